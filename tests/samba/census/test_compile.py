"""Compile and trace: the call shapes of the census. What is compiled trains as PyTorch does, bit for bit."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from sambasim.pef import read
from tests.samba.census.support import (
    LogReg,
    OnlyOut,
    Plainly,
    batch_of,
    equal,
    imported,
    parsed,
    refused,
    same_weights,
    seeded,
)

FLAGS = ("--pef-name=logreg", "-b=4")
PEF = Path("out/logreg/logreg.pef")


@dataclass
class App:
    """What an app has when it comes to compile."""

    samba: Any
    args: Any
    model: Any
    inputs: Any
    optimizer: Any
    plainly: Plainly

    @property
    def utils(self) -> Any:
        return self.samba.utils

    @property
    def common(self) -> dict[str, Any]:
        return {"name": "logreg", "app_dir": self.utils.get_file_dir(__file__), "config_dict": vars(self.args)}

    @property
    def meta(self) -> dict[str, Any]:
        return dict(self.utils.pef_utils.get_pefmeta(self.args, self.model))

    def executed(self, call: str) -> Any:
        """The value of `call`, with the names of an app."""
        names = {
            "session": self.samba.session, "utils": self.utils, "trace_graph": self.utils.trace_graph,
            "model": self.model, "inputs": self.inputs, "opt": self.optimizer, "args": self.args, "vars": vars,
            "folder": self.utils.get_file_dir(__file__), "common": self.common, "meta": self.meta,
            "metadata": _metadata,
        }  # fmt: skip
        return eval(call, names)

    def trace(self, **options: Any) -> Any:
        return self.utils.trace_graph(self.model, self.inputs, self.optimizer, **{"pef": str(PEF), **options})

    def trains(self, steps: int = 2) -> bool:
        """Whether the traced model trains as PyTorch does."""
        for number in range(steps):
            batch = batch_of(self.samba, number)
            loss, out = self.samba.session.run(input_tensors=batch, output_tensors=self.model.output_tensors)
            expected = self.plainly.step(batch)
            assert equal(loss, expected[0])
            assert equal(out, expected[1])
        self.samba.session.to_cpu(self.model)
        return same_weights(self.model, self.plainly.model)


def _app(samba: Any, command: str = "compile", *flags: str, model: type[Any] = LogReg) -> App:
    args = parsed(command, *(flags or FLAGS))
    made = samba.from_torch_model_(seeded(model))
    optimizer = samba.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    return App(samba, args, made, tuple(batch_of(samba)), optimizer, Plainly(made))


def _metadata() -> dict[Any, Any]:
    metadata = imported("mac.metadata")
    conv, tiling = metadata.ConvTilingMetadata, metadata.TilingMetadata
    return {conv.key: conv(original_size=[8, 8]), tiling.key: tiling(original_size=[8, 8], num_tiles=4)}


COMPILES = [
    "session.compile(model, inputs, opt, name='logreg', app_dir=folder, config_dict=vars(args), pef_metadata=meta)",
    "session.compile(model, inputs, opt, **common, pef_metadata=meta, squeeze_bs_dim=True)",
    "session.compile(model, inputs, opt, **common, pef_metadata=meta, squeeze_bs_dim=False)",
    "session.compile(model, inputs, opt, 'logreg', config_dict=vars(args), pef_metadata=meta, squeeze_bs_dim=True)",
    "session.compile(model, inputs, opt, **common, pef_metadata=meta, io_host_memory=None)",
    "session.compile(model=model, inputs=inputs, optimizers=opt, name='logreg', config_dict=vars(args), "
    "pef_metadata=meta)",
    "session.compile(model, inputs, opt, **common, init_output_grads=True, squeeze_bs_dim=True)",
    "session.compile(model, inputs, opt, name='logreg', app_dir=folder)",
    "session.compile(model, inputs, opt, **common, pef_metadata=meta, metadata=metadata())",
    "session.compile(model, inputs, opt, **common, init_output_grads=not args.inference, squeeze_bs_dim=True, "
    "pef_metadata={**meta, 'input_shapes': [(4, 8), (4,)]})",
    "session.compile(model, inputs, opt, **common, pef_metadata=meta, is_split_batch=False, "
    "graph_transform_hook=lambda graph: graph, io_host_memory=True)",
    "session.compile(model, [*inputs], optimizers=opt, name='logreg', inference=False, config_dict=dict(vars(args)), "
    "pef_metadata=utils.pef_utils.get_pefmeta_dict(vars(args), model))",
    "(lambda function, *words, **options: function(*words, **options))(session.compile, model, inputs, opt, **common)",
    "utils.compile(args, model, inputs, opt, name='logreg', app_dir=folder)",
    "utils.common.common_app_driver(args, model, inputs, opt, name='logreg', app_dir=folder)",
    "utils.common.common_app_driver(args, model, inputs, opt, name='logreg')",
    "utils.common.common_app_driver(args=args, model=model, inputs=inputs, optim=opt, name=model.__class__.__name__, "
    "init_output_grads=not args.inference, app_dir=folder)",
    "utils.common.common_app_driver(args=args, model=model, inputs=inputs, optim=opt, name='logreg', "
    "squeeze_bs_dim=True, get_output_grads=False, app_dir=folder)",
]


@pytest.mark.parametrize("call", COMPILES)
def test_compile(call: str, samba: Any) -> None:
    app = _app(samba)
    path = app.executed(call)
    assert PEF.is_file()
    assert "common_app_driver" in call or path == str(PEF.absolute())
    app.trace()
    assert app.trains()
    metadata = read(PEF).metadata
    if "pef_metadata=" in call:
        assert metadata["pef_name"] == "logreg"
    if "input_shapes" in call:
        assert metadata["input_shapes"] == "[(4, 8), (4,)]"
    if "metadata()" in call:
        assert any("tiling" in key.lower() for key in metadata)


class Masked(LogReg):
    """LogReg with an input that may be missing."""

    def forward(self, image: Tensor, label: Tensor, mask: Tensor | None = None) -> Any:
        return super().forward(image if mask is None else image * mask, label)


INPUTS: dict[str, Callable[[tuple[Any, Any]], Any]] = {
    "tuple": lambda pair: pair,
    "list": list,
    "dict": lambda pair: {"image": pair[0], "label": pair[1]},
    "contains None": lambda pair: [*pair, None],
    "dict.values() with None": lambda pair: {"image": pair[0], "label": pair[1], "mask": None}.values(),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_kinds_of_inputs(kind: str, samba: Any) -> None:
    app = _app(samba, model=Masked)
    app.inputs = INPUTS[kind](app.inputs)
    path = app.samba.session.compile(
        app.model, app.inputs, optimizers=app.optimizer, name="logreg", config_dict=vars(app.args)
    )
    assert path == str(PEF.absolute())
    app.trace()
    if kind == "dict":
        app.samba.session.run(app.inputs, app.model.output_tensors)
        app.plainly.step(batch_of(samba))
    assert app.trains()


def test_inputs_are_one_samba_tensor(samba: Any) -> None:
    model = samba.from_torch_model_(seeded(OnlyOut))
    image = samba.randn(4, 8, name="image", batch_dim=0)
    pef = samba.session.compile(model, image, None, name="only", inference=True)
    samba.utils.trace_graph(model, image, None, pef=pef)
    (out,) = samba.session.run(image, model.output_tensors)
    assert equal(out, model(samba.to_torch(image)))


@pytest.mark.parametrize("name", ["compile_multigraph", "add_graph", "init_multigraph_runtime"])
def test_several_graphs_in_a_pef_are_absent(name: str, samba: Any) -> None:
    with refused(f"session has no {name}"):
        getattr(samba.session, name)(name="net", config_dict={}, pef_metadata={}, inference=True)


@pytest.mark.parametrize("command", ["run", "test"])
def test_common_app_driver_is_called_for_run_and_test_too(
    command: str, samba: Any, pef_of: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    app = _app(samba, command, f"--pef={pef_of()}")
    assert app.utils.common.common_app_driver(app.args, app.model, app.inputs, app.optimizer, name="logreg") is None
    assert samba.session.machine is None
    app.trace(pef=app.args.pef)
    assert app.trains()


def test_common_app_driver_measures_twice_in_a_row(
    samba: Any, pef_of: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    app = _app(samba, "measure-performance", f"--pef={pef_of()}", "-b=4", "--num-iterations=2")
    for _ in range(2):
        app.utils.common.common_app_driver(
            args=app.args, model=app.model, inputs=app.inputs, optim=app.optimizer, name="logreg", squeeze_bs_dim=False,
            init_output_grads=False, app_dir=app.utils.get_file_dir(__file__),
        )  # fmt: skip
    assert capsys.readouterr().out.count("2 steps") == 2


TRACES = [
    "(model, inputs, opt, pef=args.pef, mapping=args.mapping)",
    "(model, inputs, opt, pef=args.pef)",
    "(model, inputs, opt, config_dict=vars(args))",
    "(model, inputs, opt, config_dict=vars(args), squeeze_bs_dim=True)",
    "(args, model, inputs, opt)",
    "(model, inputs, opt, pef=args.pef, mapping=args.mapping, distlearn_config=args.distlearn_config)",
    "(model, inputs, opt, pef=args.pef, distlearn_config=None, data_parallel_mode=args.data_parallel_mode)",
    "(model, inputs, optim=opt, init_output_grads=not args.inference, pef=args.pef)",
    "(model, inputs, opt, init_output_grads=not args.inference, pef=args.pef)",
    "(model, inputs, opt, init_output_grads=True, pef=args.pef, dev_mode=True)",
    "(model, inputs, opt, pef=args.pef, mapping=args.mapping, dev_mode=True)",
    "(model, inputs, opt, pef=args.pef, loss_indices=[0])",
]


@pytest.mark.parametrize("shape", TRACES)
def test_trace_graph(shape: str, samba: Any, pef_of: Callable[..., str]) -> None:
    app = _app(samba, "run", f"--pef={pef_of()}")
    traced_outputs = app.executed(f"trace_graph{shape}")
    assert isinstance(traced_outputs, tuple)
    assert [one.sn_name for one in traced_outputs] == [one.sn_name for one in app.model.output_tensors]
    assert [tuple(one.shape) for one in traced_outputs] == [(), (4, 64)]
    assert traced_outputs[0].sn_grad is None
    assert app.trains()


def test_trace_graph_of_a_literal_path(samba: Any) -> None:
    app = _app(samba)
    samba.session.compile(app.model, app.inputs, app.optimizer, name="logreg", config_dict=vars(app.args))
    samba.utils.trace_graph(app.model, app.inputs, app.optimizer, pef="out/logreg/logreg.pef")
    assert app.trains()


@pytest.mark.parametrize(
    "options", [{"transfer_device": False}, {"transfer_device": False, "data_parallel_mode": "normal"}]
)
def test_trace_graph_without_a_transfer_and_then_to_device(
    options: dict[str, Any], samba: Any, pef_of: Callable[..., str]
) -> None:
    app = _app(samba, "run", f"--pef={pef_of()}")
    app.utils.trace_graph(app.model, app.inputs, app.optimizer, config_dict=vars(app.args), **options)
    samba.session.to_device()
    assert app.trains()


def test_trace_graph_of_a_dict_with_loss_indices(samba: Any) -> None:
    app = _app(samba, model=Masked)
    inputs = {"image": app.inputs[0], "label": app.inputs[1]}
    pef = samba.session.compile(app.model, inputs, app.optimizer, name="logreg", config_dict=vars(app.args))
    app.utils.trace_graph(
        app.model, inputs, app.optimizer, pef=pef, loss_indices=[0], data_parallel_mode="normal", transfer_device=True
    )
    samba.session.run(inputs, app.model.output_tensors[0])
    app.plainly.step(batch_of(samba))
    assert app.trains()


def test_traced_outputs_are_kept_and_ignored(samba: Any, pef_of: Callable[..., str], batch: list[Any]) -> None:
    app = _app(samba, "run", f"--pef={pef_of()}")
    kept = app.trace(pef=app.args.pef)
    from_kept = samba.session.run(batch, kept, section_types=["fwd"])
    from_attribute = samba.session.run(batch, app.model.output_tensors, section_types=["fwd"])
    assert all(equal(*pair) for pair in zip(from_kept, from_attribute, strict=True))


def test_the_commands_of_an_app_in_one_script(samba: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("compile", "run"):
        monkeypatch.setattr(sys, "argv", ["app.py", command, *(FLAGS if command == "compile" else (f"--pef={PEF}",))])
        app = _app(samba, *sys.argv[1:])
        if app.args.command == "compile":
            samba.session.compile(app.model, app.inputs, app.optimizer, **app.common, pef_metadata=app.meta)
        elif app.args.command == "run":
            app.trace(pef=app.args.pef, mapping=app.args.mapping)
            assert app.trains()
