"""What a step does beside its tensors is refused with its line, or told, or compiles. Most of it is in tests/state."""

# Calling a module gives Any, and parts of autograd have no types.
# mypy: no-warn-return-any, allow-untyped-calls

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.capture.step import Example
from sambasim.errors import CaptureError, ModelError
from sambasim.pef.document import Compiled
from tests.support.compiled import compile_model, net_options

Then: TypeAlias = Callable[[Any, Tensor], Tensor]


def counter() -> Callable[[], int]:
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1  # here
        return count

    return counted


class Keeper:
    tensor = torch.zeros(3)


class Faded(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, rate: float = -1.0) -> Tensor:
        context.rate = rate
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient * context.rate, None


class Net(nn.Module):
    """A linear layer, whose outputs `then` makes into something, and their mean square."""

    def __init__(self, then: Then = lambda net, h: h) -> None:
        super().__init__()
        self.linear, self.norm, self.then = nn.Linear(4, 3), nn.BatchNorm1d(3), then
        self.plain, self.calls = torch.zeros(()), 0
        self.hidden: Tensor | None = None
        self.keeper, self.counted = Keeper(), counter()

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.linear(x)).square().mean()


NAMES = {**globals(), "checkpoint": torch.utils.checkpoint.checkpoint, "calls": 0, "of_python": random.Random(0)}
"""What the bodies below may name."""

READ = "which each call changes, and on which later calls depend"
REFUSED = {
    # what is said, the body
    "a parameter replaced": ("which forward() replaces",
        "net.linear.bias = nn.Parameter(net.linear.bias * 0.5)  # here", "return h"),
    "a hidden state": (f"model.hidden, {READ}",
        "h, net.hidden = h + (0 if net.hidden is None else net.hidden), h.detach()  # here", "return h"),
    "a tensor for evaluation": (f"model.plain, {READ}",
        "if net.training: net.plain = h.detach().mean()  # here", "return h - net.plain"),
    "a counter of the backward": (f"global calls, {READ}",
        "global calls", "calls += 1  # here", "return Faded.apply(h, 1 / calls)"),
    "a tensor in an object": (f"model.keeper.tensor, {READ}",
        "h, net.keeper.tensor = h + net.keeper.tensor, h.detach()  # here", "return h"),
    "a closure": (f"count of counted at test_state.py:{counter().__code__.co_firstlineno}, {READ}",
        "return h / net.counted()"),
    "its own numbers of Python": (f"global of_python, {READ}", "return h * of_python.random()  # here"),
    "a function in it": ("torch.inference_mode()", "return h + torch.inference_mode()(torch.ones)(3)  # here"),
    "a checkpoint without a gradient": ("activation checkpointing that changes results",
        "return h + checkpoint(net.linear, torch.ones(2, 4), use_reentrant=True)  # here"),
    "torch.cond": ("torch.cond, which a PEF cannot hold",
        "return torch.cond(h.sum() > 0, lambda a: a * 2, lambda a: a.sin(), (h,))  # here"),
}  # fmt: skip


def function_of(body: Sequence[str], folder: Path) -> Then:
    file = folder / "then.py"
    file.write_text("\n    ".join(("def then(net, h):", *body)), encoding="utf-8")
    names = dict(NAMES)
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)
    then: Then = names["then"]
    return then


def compiled(model: nn.Module | Then, folder: Path, **options: object) -> Compiled:
    model = model if isinstance(model, nn.Module) else Net(model)
    options = {"data": {"source": "net:data"}, **options}
    return compile_model(model, Example({"x": torch.randn(2, 4)}), net_options(folder, **options))


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_would_lose_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    said, *body = REFUSED[name]
    with pytest.raises(CaptureError) as caught:
        compiled(function_of(body, tmp_path), tmp_path)
    assert said in caught.value.what
    assert str(caught.value.where).endswith("# here")


def test_a_tensor_that_each_call_makes_anew_is_told(tmp_path: Path) -> None:
    body = ("net.plain, net.extra = h.detach(), h.mean()", "return h + net.extra")
    notices = compiled(function_of(body, tmp_path), tmp_path).notices
    (told,) = [notice for notice in notices if "changed by each call" in notice]
    assert "model.extra" in told


def test_evaluation_and_inference_refuse_state_too(tmp_path: Path) -> None:
    counts = function_of(("net.calls += 1", "return h * net.calls"), tmp_path)
    for then, options in ((lambda net, h: h if net.training else counts(net, h), {}), (counts, {"inference": True})):
        with pytest.raises(CaptureError, match=f"model.calls, {READ}"):
            compiled(then, tmp_path, **options)


@pytest.mark.parametrize("body", ["return Faded.apply(h)", "h.register_hook(torch.neg)\n    return h"])
def test_a_backward_of_the_users_own_is_captured_in_a_narrow_type(body: str, tmp_path: Path) -> None:
    body = f"if not h.requires_grad: return h\n    {body}"
    assert compiled(function_of((body,), tmp_path), tmp_path, dtype="bf16").program.training is not None


class Wrapped(nn.parallel.DistributedDataParallel):
    def __init__(self, module: nn.Module) -> None:  # without a process group
        nn.Module.__init__(self)
        self.module = module


def test_what_several_replicas_or_a_graph_cannot_have_is_one_error(tmp_path: Path) -> None:
    net: Any = Net()
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
    net = Net(lambda net, h: net.norm(net.frozen(h)))
    net.frozen = nn.BatchNorm1d(3).eval()
    net.training = whole
    modes = [module.training for module in net.modules()]
    made = compiled(net, tmp_path).program
    assert [module.training for module in net.modules()] == modes
    assert made.single is not None
    updated = {output.symbol for output in made.step.outputs if "running_mean" in str(output.symbol)}
    assert len(updated) == (1 if whole else 2)
