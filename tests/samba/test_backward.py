"""Where a backward starts: from the loss, wherever a model returns it, or from gradients that the app sets."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from sambasim import samba
from sambasim.errors import DataError, OptionError
from sambasim.samba.process import Reporter
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.harness import sn_grad, with_sgd

BATCH = 4


def _features() -> samba.SambaTensor:
    values = torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(0))
    return samba.from_torch_tensor(values, name="x", batch_dim=0)


class Returning(nn.Module):
    """One linear layer, and what `then` makes of its outputs."""

    output_tensors: tuple[samba.SambaTensor, ...]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)


class LossSecond(Returning):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y.square().mean()


class LossByName(Returning):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        losses = y.square().mean(1)
        return y.mean(1), losses


class Unnamed(Returning):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y.mean(1), y.square().mean(1)


class TwoOutputs(Returning):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, y.sigmoid()


class OneOutput(Returning):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def _traced(folder: Path, kind: type[Returning], loss_indices: list[int] | int | None = None) -> Returning:
    model, optimizer = with_sgd(kind)
    config = {"output_folder": str(folder)}
    pef = session.compile(model, [_features()], optimizer, "net", config_dict=config, loss_indices=loss_indices)
    trace_graph(model, [_features()], optimizer, pef=pef, loss_indices=loss_indices)
    return cast(Returning, model)


@pytest.mark.parametrize(
    ("kind", "loss_indices", "starts"),
    [
        (LossSecond, None, [1]),
        (LossByName, None, [1]),
        (Unnamed, None, [0]),
        (Unnamed, [1], [1]),
        (Unnamed, [0, 1], [0, 1]),
    ],
    ids=["second", "by-name", "first", "by-index", "both"],
)
def test_the_backward_starts_from_the_loss_wherever_it_is(
    tmp_path: Path, reporter: Reporter, kind: type[Returning], loss_indices: list[int] | int | None, starts: list[int]
) -> None:
    model = _traced(tmp_path, kind, loss_indices)
    found = session.run([_features()], section_types=["FWD", "BCKWD"])
    outputs = model(samba.to_torch(_features()))
    assert [one.shape for one in found] == [one.shape for one in outputs], "outputs keep their order"
    (expected,) = torch.autograd.grad([outputs[index].mean() for index in starts], [model.linear.weight])
    torch.testing.assert_close(sn_grad(model.linear.weight), expected)
    assert reporter.findings == ()


def test_a_model_with_outputs_and_no_loss_starts_from_gradients_that_are_set(tmp_path: Path) -> None:
    model, x = _traced(tmp_path, TwoOutputs), _features()
    with pytest.raises(DataError) as caught:
        session.run([x])
    first, second = (one.sn_name for one in model.output_tensors)
    what = f"AP09: the model returns no loss, and no gradient is set on its outputs: {first}, {second}"
    assert caught.value.what == what
    assert "grad_of_outputs=[…]" in str(caught.value.remedy)
    assert str(caught.value.where).endswith(": session.run([x])")
    gradient = torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(3))
    for index in (0, 1):
        given = [gradient if place == index else None for place in (0, 1)]
        trace_graph(model, [x], samba.optim.SGD(model.parameters(), lr=0.1), pef=str(tmp_path / "net" / "net.pef"))
        session.run([x], grad_of_outputs=given, section_types=["FWD", "BCKWD"])
        (expected,) = torch.autograd.grad(model(samba.to_torch(x))[index], [model.linear.weight], gradient)
        torch.testing.assert_close(sn_grad(model.linear.weight), expected)
    with pytest.raises(OptionError, match="grad_of_outputs has 3 gradients for 2 outputs"):
        session.run([x], grad_of_outputs=[gradient, None, None])


def _starts_from(model: Returning, output: int, gradient: Tensor, **options: Any) -> bool:
    """Whether a backward with `options` starts from `gradient` at this output, and from nothing else."""
    session.run([_features()], section_types=["FWD", "BCKWD"], **options)
    (expected,) = torch.autograd.grad(model(samba.to_torch(_features()))[output], [model.linear.weight], gradient)
    is_so = torch.allclose(sn_grad(model.linear.weight), expected)
    session.run(section_types=["OPT"], hyperparam_dict={"lr": 0.0})
    return is_so


def test_gradients_for_one_run_are_gone_after_it_and_those_that_are_set_hold(tmp_path: Path) -> None:
    model, x = _traced(tmp_path, TwoOutputs), _features()
    gradient, other = torch.randn(2, BATCH, 3, generator=torch.Generator().manual_seed(3))
    assert _starts_from(model, 0, gradient, grad_of_outputs=[gradient, None])
    assert _starts_from(model, 1, other, grad_of_outputs=[None, other])
    with pytest.raises(DataError, match="AP09: the model returns no loss"):
        session.run([x])
    found: Any = session.run([x], section_types=["FWD"])
    first, second = found
    second.float().sn_grad = other
    assert _starts_from(model, 1, other)
    assert _starts_from(model, 0, gradient, grad_of_outputs=[gradient, None])
    assert _starts_from(model, 1, other), "it was set, and holds"
    second.sn_grad, first.sn_grad = None, gradient
    assert _starts_from(model, 0, gradient), "set on an output of a run before the last"


def test_a_backward_from_an_output_that_is_no_loss_is_told_unless_its_gradient_is_set(
    tmp_path: Path, reporter: Reporter, capsys: pytest.CaptureFixture[str]
) -> None:
    model, x = _traced(tmp_path, OneOutput), _features()
    capsys.readouterr()
    session.run([x], section_types=["FWD"])
    model.output_tensors[0].sn_grad = torch.ones(BATCH, 3)
    session.run([x])
    model.output_tensors[0].sn_grad = None
    assert reporter.findings == ()
    for _ in range(2):
        session.run([x])
    told = capsys.readouterr().err.splitlines()
    what = "the backward starts from the mean of oneoutput__loss, of shape (4, 3): it is no loss"
    assert told[0] == f"notice: AP09: {what}"
    assert told[1].endswith(": session.run([x])")
    assert told[2:] == ["  try:   return a loss, or set output.sn_grad before the backward"]
