"""Compile and trace: the call shapes of the census, of which each trains as PyTorch does, bit for bit; and what is said
of a model that is not the one that was compiled: as much as differs, and where."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import PefError
from sambasim.pef import read
from sambasim.samba.utils import trace_graph
from tests.samba.harness import (
    LogReg,
    Plainly,
    batch_of,
    compiled,
    equal,
    imported,
    parsed,
    same_weights,
    seeded,
    with_sgd,
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
    "session.compile(model, inputs, opt, **common, init_output_grads=not args.inference, squeeze_bs_dim=True, "
    "io_host_memory=True, pef_metadata={**meta, 'input_shapes': [(4, 8), (4,)]}, metadata=metadata())",
    "session.compile(model=model, inputs=[*inputs], optimizers=opt, name='logreg', inference=False, "
    "config_dict=dict(vars(args)), pef_metadata=utils.pef_utils.get_pefmeta_dict(vars(args), model))",
    "utils.compile(args, model, inputs, opt, name='logreg', app_dir=folder)",
    "utils.common.common_app_driver(args=args, model=model, inputs=inputs, optim=opt, name='logreg', "
    "squeeze_bs_dim=True, get_output_grads=False, app_dir=folder)",
]


@pytest.mark.parametrize("call", COMPILES)
def test_compile(call: str, samba: Any, capsys: pytest.CaptureFixture[str]) -> None:
    app = _app(samba)
    path = app.executed(call)
    assert capsys.readouterr().out.endswith(f"PEF file {PEF.absolute()} created\nCompilation succeeded\n")
    assert PEF.is_file()
    assert "common_app_driver" in call or path == str(PEF.absolute())
    app.trace()
    assert app.trains()
    metadata = read(PEF).metadata
    if "pef_metadata=" in call:
        assert (metadata["pef_name"], metadata["model_repr"]) == ("logreg", repr(app.model))
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
    options = {"name": "logreg", "config_dict": vars(app.args)}
    path = app.samba.session.compile(app.model, app.inputs, optimizers=app.optimizer, **options)
    assert path == str(PEF.absolute())
    app.trace()
    if kind == "dict":
        app.samba.session.run(app.inputs, app.model.output_tensors)
        app.plainly.step(batch_of(samba))
    assert app.trains()


TRACES = [
    "(model, inputs, opt, pef=args.pef, mapping=args.mapping, distlearn_config=args.distlearn_config)",
    "(model, inputs, opt, config_dict=vars(args), squeeze_bs_dim=True)",
    "(args, model, inputs, opt)",
    "(model, inputs, optim=opt, init_output_grads=not args.inference, pef=args.pef, dev_mode=True)",
]


@pytest.mark.parametrize("shape", TRACES)
def test_trace_graph(shape: str, samba: Any, logreg_pef: str) -> None:
    app = _app(samba, "run", f"--pef={logreg_pef}")
    traced_outputs = app.executed(f"trace_graph{shape}")
    assert isinstance(traced_outputs, tuple)
    assert [one.sn_name for one in traced_outputs] == [one.sn_name for one in app.model.output_tensors]
    assert [tuple(one.shape) for one in traced_outputs] == [(), (4, 64)]
    assert traced_outputs[0].sn_grad is None
    assert app.trains()


def test_trace_graph_without_a_transfer_and_then_to_device(samba: Any, logreg_pef: str) -> None:
    app = _app(samba, "run", f"--pef={logreg_pef}")
    options = {"transfer_device": False, "data_parallel_mode": "normal"}
    outputs = app.utils.trace_graph(app.model, app.inputs, app.optimizer, config_dict=vars(app.args), **options)
    assert not outputs[0].has_data
    (weight,) = samba.session.get_tensors_by_name(["logreg__lin_layer__weight"])
    assert not weight.any(), "nothing was sent to the device"
    samba.session.to_device()
    assert app.trains()


Function = Callable[[Tensor], Tensor]


class With(nn.Module):
    """A layer, what the case does with it, and a loss."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x)).mean()


def _clamp(low: float, high: float) -> Function:
    return lambda x: x.clamp(low, high)


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (_clamp(0.0, 1.0), _clamp(0.0, 2.0), "max is 1.0 in the PEF, and 2.0 in the model: an argument of `aten.clamp"),
        (torch.relu, torch.tanh, "the PEF has `aten.relu.default` from "),
        (lambda x: x.sum(0), lambda x: x.sum(1), "dim is (0,) in the PEF, and (1,) in the model"),
    ],
    ids=["an argument", "another operator", "a shape"],
)
def test_the_first_difference_alone_is_told(tmp_path: Path, before: Function, now: Function, words: str) -> None:
    inputs = [samba.from_torch_tensor(torch.ones(3, 3), name="x", batch_dim=0)]
    pef = compiled(with_sgd(lambda: With(before)), inputs, tmp_path)
    model, optimizer = with_sgd(lambda: With(now))
    with pytest.raises(PefError) as caught:
        trace_graph(model, inputs, optimizer, pef=pef)
    said = str(caught.value)
    assert words in said
    assert f" from tests/samba/{Path(__file__).name}:" in said, "the line of the model"
    assert "%" not in said, "the operands are the same"


SCALE = torch.tensor([1.0, 0.0, -2.0])


class Scaled(nn.Module):
    """With tensors that no module has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.scales = [{"first": torch.tensor([3.0, 1.0, 2.0])}]

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.linear(x) * SCALE * self.scales[0]["first"]
        return outputs.square().mean()


@pytest.mark.parametrize("change", ["SCALE", "first"])
def test_a_tensor_of_no_module_is_a_constant_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    monkeypatch.setattr(f"{__name__}.SCALE", SCALE.clone())
    model, optimizer = with_sgd(Scaled)
    inputs = [samba.from_torch_tensor(torch.randn(4, 5), name="x", batch_dim=0)]
    pef = compiled((model, optimizer), inputs, tmp_path)
    trace_graph(model, inputs, optimizer, pef=pef)
    (loss,) = samba.session.run(inputs)
    assert torch.equal(loss, model(*inputs))
    (SCALE if change == "SCALE" else model.scales[0]["first"])[0] = 3.5
    with pytest.raises(
        PefError, match=rf"the constant scaled__\w*{change}\w*, which is read by `aten\.mul\.Tensor` from"
    ):
        trace_graph(model, inputs, optimizer, pef=pef)
