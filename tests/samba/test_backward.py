"""Where a backward starts: from the loss, wherever a model returns it, or from gradients that the app sets."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sambasim import samba
from sambasim.errors import DataError, OptionError
from sambasim.samba.process import Reporter
from sambasim.samba.session import session
from sambasim.samba.utils import trace_graph
from tests.samba.harness import BATCH, Layer, Load, compiled, equal, layer_batch, refused, with_sgd


def two_vectors(y: Tensor) -> tuple[Tensor, Tensor]:
    return y.mean(1), y.square().mean(1)


two_outputs = partial(with_sgd, lambda: Layer(lambda y: (y, y.sigmoid())))
one_output = partial(with_sgd, Layer)


@pytest.mark.parametrize(
    ("make", "loss_indices", "starts"),
    [
        (lambda: Layer(lambda y: (y, y.square().mean())), None, [1]),
        (lambda: Layer(two_vectors), 1, [1]),
        (lambda: Layer(two_vectors), [0, 1], [0, 1]),
    ],
    ids=["second", "by-index", "both"],
)
def test_the_backward_starts_from_the_loss_wherever_it_is(
    tmp_path: Path, reporter: Reporter, make: Any, loss_indices: list[int] | int | None, starts: list[int]
) -> None:
    (model, optimizer), x = with_sgd(make), layer_batch()
    pef = compiled((model, optimizer), x, tmp_path, loss_indices=loss_indices)
    trace_graph(model, x, optimizer, pef=pef, loss_indices=loss_indices)
    found = session.run(x, section_types=["FWD", "BCKWD"])
    outputs = model(samba.to_torch(x[0]))
    assert [one.shape for one in found] == [one.shape for one in outputs], "outputs keep their order"
    (expected,) = torch.autograd.grad([outputs[index].mean() for index in starts], [model.linear.weight])
    torch.testing.assert_close(model.linear.weight.sn_grad, expected)
    assert reporter.findings == ()


def test_gradients_for_one_run_are_gone_after_it_and_those_that_are_set_hold(load: Load) -> None:
    """Of a model with two outputs and no loss."""
    (x,) = layer_batch()
    model, _ = load(two_outputs, [x])

    def starts_from(output: int, gradient: Tensor, **options: Any) -> bool:
        """Whether a backward with `options` starts from `gradient` at this output, and from nothing else."""
        session.run([x], section_types=["FWD", "BCKWD"], **options)
        (expected,) = torch.autograd.grad(model(samba.to_torch(x))[output], [model.linear.weight], gradient)
        is_so = equal(model.linear.weight.sn_grad, expected)
        session.run(section_types=["OPT"], hyperparam_dict={"lr": 0.0})
        return is_so

    no_loss = "AP09: the model returns no loss, and no gradient is set on its outputs: "
    no_loss += ", ".join(one.sn_name for one in model.output_tensors)
    with refused(DataError, no_loss, r"grad_of_outputs=\[…\]", r": session\.run\(\[x\]\)$"):
        session.run([x])
    gradient, other = torch.randn(2, BATCH, 3, generator=torch.Generator().manual_seed(3))
    assert starts_from(0, gradient, grad_of_outputs=[samba.from_torch_tensor(gradient), None])
    assert starts_from(1, other, grad_of_outputs=[None, other])
    with pytest.raises(OptionError, match="grad_of_outputs has 3 gradients for 2 outputs"):
        session.run([x], grad_of_outputs=[gradient, None, None])
    with refused(DataError, no_loss):
        session.run([x])
    found: Any = session.run([x], section_types=["FWD"])
    first, second = found
    second.float().sn_grad = other
    assert starts_from(1, other)
    assert starts_from(0, gradient, grad_of_outputs=[gradient, None])
    assert starts_from(1, other), "it was set, and holds"
    second.sn_grad, first.sn_grad = None, gradient
    assert starts_from(0, gradient), "set on an output of a run before the last"
    session.ctx.set_tensors({f"{first.sn_name}__grad": (2 * gradient).numpy()})
    assert starts_from(0, 2 * gradient)
    first.sn_grad = torch.ones(2)
    with refused(DataError, rf"sn_grad of {first.sn_name} has the shape \(2,\), and the output \(4, 3\)"):
        session.run([x])


def test_a_backward_from_an_output_that_is_no_loss_is_told_unless_its_gradient_is_set(
    load: Load, reporter: Reporter, capsys: pytest.CaptureFixture[str]
) -> None:
    x = layer_batch()
    model, _ = load(one_output, x)
    capsys.readouterr()
    session.run(x, section_types=["FWD"])
    model.output_tensors[0].sn_grad = torch.ones(BATCH, 3)
    session.run(x)
    model.output_tensors[0].sn_grad = None
    assert reporter.findings == ()
    for _ in range(2):
        session.run(x)
    notice, where, remedy = capsys.readouterr().err.splitlines()
    what = "the backward starts from the mean of layer__loss, of shape (4, 3): it is no loss"
    assert notice == f"notice: AP09: {what}"
    assert where.endswith(": session.run(x)")
    assert remedy == "  try:   return a loss, or set output.sn_grad before the backward"
