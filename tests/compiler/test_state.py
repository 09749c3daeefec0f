"""What a step does beside its tensors is refused with its line, or told, or compiles. Most of it is in tests/state."""

# Calling a module gives Any, and parts of autograd have no types.
# mypy: no-warn-return-any, allow-untyped-calls

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.capture.step import Example
from sambasim.errors import CaptureError, ModelError
from sambasim.pef.document import Compiled
from tests.support.compiled import Made, compile_model, net_options

Then: TypeAlias = Callable[[Any, Tensor], Tensor]


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -gradient


def net_of(then: Then = lambda net, h: h) -> Any:
    """A linear layer, whose outputs `then` makes into something, and their mean square."""
    layers = {"linear": nn.Linear(4, 3), "norm": nn.BatchNorm1d(3)}
    return Made(lambda net, x: then(net, net.linear(x)).square().mean(), calls=0, **layers)


def compiled(model: nn.Module | Then, folder: Path, **options: object) -> Compiled:
    model = model if isinstance(model, nn.Module) else net_of(model)
    options = {"data": {"source": "net:data"}, **options}
    return compile_model(model, Example({"x": torch.randn(2, 4)}), net_options(folder, **options))


def branching(net: Any, h: Tensor) -> Tensor:
    return torch.cond(h.sum() > 0, lambda a: a * 2, lambda a: a.sin(), (h,))  # here


def test_what_a_pef_cannot_hold_is_refused_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"torch\.cond, which a PEF cannot hold") as caught:
        compiled(branching, tmp_path)
    assert str(caught.value.where).endswith("# here")


def keeping(net: Any, h: Tensor) -> Tensor:
    net.plain, net.extra = h.detach(), h.mean()
    return h + net.extra


def test_a_tensor_that_each_call_makes_anew_is_told(tmp_path: Path) -> None:
    (told,) = [notice for notice in compiled(keeping, tmp_path).notices if "changed by each call" in notice]
    assert "model.extra" in told


def counting(net: Any, h: Tensor) -> Tensor:
    net.calls += 1
    return h * net.calls


def test_evaluation_and_inference_refuse_state_too(tmp_path: Path) -> None:
    said = r"model\.calls, which each call changes, and on which later calls depend"
    for then, inference in ((lambda net, h: h if net.training else counting(net, h), False), (counting, True)):
        with pytest.raises(CaptureError, match=said):
            compiled(then, tmp_path, inference=inference)


def hooked(net: Any, h: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(torch.neg)
    return h


@pytest.mark.parametrize("then", [lambda net, h: Reversed.apply(h), hooked])
def test_a_backward_of_the_users_own_is_captured_in_a_narrow_type(then: Then, tmp_path: Path) -> None:
    assert compiled(then, tmp_path, dtype="bf16").program.training is not None


class Wrapped(nn.parallel.DistributedDataParallel):
    def __init__(self, module: nn.Module) -> None:  # without a process group
        nn.Module.__init__(self)
        self.module = module


def test_what_several_replicas_or_a_graph_cannot_have_is_one_error(tmp_path: Path) -> None:
    net = net_of()
    net.linear.register_full_backward_hook(lambda module, given, gradient: None)
    net.norm = nn.SyncBatchNorm(3)
    assert compiled(nn.DataParallel(net), tmp_path).program.training is not None
    on_chips = {"tensor_parallel": "batch", "n_chips": 2, "training": {"batch_size": 4}}
    with pytest.raises(
        ModelError, match="the module norm is SyncBatchNorm, whose statistics are those of all replicas"
    ):
        compiled(net, tmp_path, **on_chips)
    net.linear.weight.register_hook(lambda gradient: None)
    net.linear.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ModelError) as caught:
        compiled(Wrapped(net), tmp_path, data_parallel=True)
    hooked = [f"the parameter module.linear.{name} has a gradient hook" for name in ("weight", "bias")]
    for what in (*hooked, "the model is wrapped in Wrapped", "the module module.norm is SyncBatchNorm"):
        assert what in caught.value.what
    assert "--data-parallel" in str(caught.value.remedy)
    assert compiled(net, tmp_path, inference=True).program.training is None


@pytest.mark.parametrize("whole", [True, False], ids=["in training mode", "in evaluation mode as a whole"])
def test_modes_are_respected_and_restored(whole: bool, tmp_path: Path) -> None:
    net = net_of(lambda net, h: net.norm(net.frozen(h)))
    net.frozen = nn.BatchNorm1d(3).eval()
    net.training = whole
    modes = [module.training for module in net.modules()]
    made = compiled(net, tmp_path).program
    assert [module.training for module in net.modules()] == modes
    assert made.single is not None
    updated = {output.symbol for output in made.step.outputs if "running_mean" in str(output.symbol)}
    assert len(updated) == (1 if whole else 2)
