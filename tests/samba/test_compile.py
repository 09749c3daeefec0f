"""Compile and trace: the call shapes of the census, of which each trains as PyTorch does, bit for bit; and what is said
of a model that is not the one that was compiled: as much as differs, and where."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import PefError
from sambasim.pef import read
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.harness import (
    MOMENTUM,
    Layer,
    LogReg,
    Plainly,
    batch_of,
    compiled,
    equal,
    imported,
    layer_batch,
    parsed,
    same_weights,
    with_sgd,
)

PEF = Path("out/logreg/logreg.pef")


class Masked(LogReg):
    """LogReg with an input that may be missing."""

    def forward(self, image: Tensor, label: Tensor, mask: Tensor | None = None) -> Any:
        return super().forward(image if mask is None else image * mask, label)


@pytest.mark.usefixtures("app")
@pytest.mark.parametrize(
    ("call", "form", "trace"),
    [
        (
            "session.compile(model, inputs, opt, name='logreg', config_dict=vars(args), pef_metadata=meta)",
            lambda image, label: (image, label),
            "model, inputs, opt, pef=args.pef, mapping=args.mapping, distlearn_config=args.distlearn_config",
        ),
        (
            "session.compile(model, inputs, opt, **common, init_output_grads=not args.inference, squeeze_bs_dim=True, "
            "io_host_memory=True, pef_metadata={**meta, 'input_shapes': [(4, 8), (4,)]}, metadata=hints)",
            lambda image, label: [image, label],
            "model, inputs, opt, config_dict=vars(args), squeeze_bs_dim=True",
        ),
        (
            "session.compile(model=model, inputs=inputs, optimizers=opt, name='logreg', inference=False, "
            "config_dict=dict(vars(args)), pef_metadata=utils.pef_utils.get_pefmeta_dict(vars(args), model))",
            lambda image, label: {"image": image, "label": label},
            "model, inputs, optim=opt, init_output_grads=not args.inference, pef=args.pef, dev_mode=True",
        ),
        (
            "utils.compile(args, model, inputs, opt, name='logreg', app_dir=folder)",
            lambda image, label: [image, label, None],
            "args, model, inputs, opt",
        ),
        (
            "utils.common.common_app_driver(args=args, model=model, inputs=inputs, optim=opt, name='logreg', "
            "squeeze_bs_dim=True, get_output_grads=False, app_dir=folder)",
            lambda image, label: {"image": image, "label": label, "mask": None}.values(),
            "model, inputs, opt, config_dict=vars(args), transfer_device=False, data_parallel_mode='normal'",
        ),
    ],
    ids=["tuple", "list", "dict", "with None", "dict.values() with None"],
)  # fmt: skip
def test_compile(call: str, form: Callable[..., Any], trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And trace, and train as PyTorch does."""
    utils, metadata = imported("samba").utils, imported("mac.metadata")
    (model, optimizer), inputs = with_sgd(Masked, momentum=MOMENTUM), form(*batch_of())
    plainly, args, folder = Plainly(model), parsed("compile", "--pef-name=logreg", "-b=4"), utils.get_file_dir(__file__)
    hints = metadata.ConvTilingMetadata([8, 8]), metadata.TilingMetadata(original_size=[8, 8], num_tiles=4)
    names = {
        "session": samba.session, "utils": utils, "model": model, "inputs": inputs, "opt": optimizer, "args": args,
        "common": {"name": "logreg", "app_dir": folder, "config_dict": vars(args)}, "folder": folder,
        "meta": utils.pef_utils.get_pefmeta(args, model), "hints": {hint.key: hint for hint in hints},
    }  # fmt: skip
    path = eval(call, names)
    assert capsys.readouterr().out.endswith(f"PEF file {PEF.absolute()} created\nCompilation succeeded\n")
    assert "common_app_driver" in call or path == str(PEF.absolute())
    outputs = eval(f"utils.trace_graph({trace})", {**names, "args": parsed("run", f"--pef={PEF}")})
    assert isinstance(outputs, tuple)
    assert [output.sn_name for output in outputs] == [output.sn_name for output in model.output_tensors]
    assert [tuple(output.shape) for output in outputs] == [(), (4, 64)]
    assert (outputs[0].has_data, outputs[0].sn_grad) == (False, None)
    if "transfer_device" in trace:
        (weight,) = samba.session.get_tensors_by_name(["masked__lin_layer__weight"])
        assert not weight.any(), "nothing was sent to the device"
        samba.session.to_device()
    for batch in ([inputs] if isinstance(inputs, dict) else []) + [batch_of(0), batch_of(1)]:
        found = samba.session.run(input_tensors=batch, output_tensors=model.output_tensors)
        assert all(map(equal, found, plainly.step([*batch.values()] if isinstance(batch, dict) else batch)))
    samba.session.to_cpu(model)
    assert same_weights(model, plainly.model)
    kept = read(PEF).metadata
    if "pef_metadata=" in call:
        assert (kept["pef_name"], kept["model_repr"]) == ("logreg", repr(model))
    if "hints" in call:
        assert kept["input_shapes"] == "[(4, 8), (4,)]"
        assert kept["tiling"] == "TilingMetadata(original_size=[8, 8], num_tiles=4)"


def test_the_first_difference_alone_is_told(tmp_path: Path) -> None:
    x = layer_batch()
    pef = compiled(with_sgd(lambda: Layer(lambda y: y.clamp(0.0, 1.0).sum(0).mean())), x, tmp_path)
    cases: tuple[tuple[Callable[[Tensor], Tensor], str], ...] = (
        (lambda y: y.clamp(0.0, 2.0).sum(0).mean(), "max is 1.0 in the PEF, and 2.0 in the model: an argument of `"),
        (lambda y: y.tanh().sum(0).mean(), "the PEF has `aten.clamp.default` from "),
        (lambda y: y.clamp(0.0, 1.0).sum(1).mean(), "dim is (0,) in the PEF, and (1,) in the model"),
    )  # fmt: skip
    for now, words in cases:
        model, optimizer = with_sgd(partial(Layer, now))
        with pytest.raises(PefError) as caught:
            trace_graph(model, x, optimizer, pef=pef)
        said = str(caught.value)
        assert words in said
        assert f" from tests/samba/{Path(__file__).name}:" in said, "the line of the model"
        assert "%" not in said, "the operands are the same"


SCALE = torch.tensor([1.0, 0.0, -2.0])


class Scaled(nn.Module):
    """With tensors that are in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.mask = torch.tensor([1.0, 0.0, -2.0])
        self.scales = [{"first": torch.tensor([3.0, 1.0, 2.0])}]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.linear(x) * self.mask * SCALE * self.scales[0]["first"]
        return outputs.square().mean(), self.linear.weight.view(-1)


def test_constants_are_on_the_device_and_outputs_are_not(tmp_path: Path) -> None:
    (model, optimizer), x = with_sgd(Scaled), layer_batch()
    pef = compiled((model, optimizer), x, tmp_path)
    trace_graph(model, x, optimizer, pef=pef)
    loss, weight = session.run(x)
    assert equal(loss, model(samba.to_torch(x[0]))[0])
    kept = weight.clone()
    session.run(x)
    assert torch.equal(weight, kept), "an output that is a view of a parameter stays what it was"
    for name, tensor in (("mask", model.mask), ("SCALE", SCALE), ("first", model.scales[0]["first"])):
        before = tensor.clone()
        tensor[0] = 3.5
        read_by = rf"the constant scaled__\w*{name}\w*, which is read by `aten\.mul\.Tensor` from "
        with pytest.raises(PefError, match=read_by) as caught:
            trace_graph(model, x, optimizer, pef=pef)
        assert 'self.scales[0]["first"], has changed since the PEF net was compiled' in str(caught.value)
        tensor.copy_(before)


class Strided(Layer):
    """With gaps between the rows of weights; the loss is its second output."""

    def __init__(self) -> None:
        super().__init__(lambda y: (y, self.more(y).mean()))
        self.more = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        for layer in (self.linear, *self.more):
            layer.weight = nn.Parameter(layer.weight.detach().repeat(1, 2)[:, : layer.in_features])


class Again(Strided):
    """Another model with the same notices."""


def test_a_notice_has_three_names_and_comes_once_for_each_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "linear.weight, more.0.weight, more.1.weight and 2 more"
    notices = (f"stored contiguously in the PEF: {names}; ", "the loss is output 2 of the model\n")
    told = []
    for name, make in {"first": Strided, "second": Strided, "other": Again}.items():
        compiled(with_sgd(make), layer_batch(), tmp_path, name)
        said = capsys.readouterr().out
        told.append([said.count(f"notice: {notice}") for notice in notices])
    assert told == [[1, 1], [0, 0], [1, 1]]
