"""What a step does beside its tensors is refused with its line, or told, or compiles: the capture holds it."""

# Calling a module gives Any, and parts of autograd have no types.
# mypy: no-warn-return-any, allow-untyped-calls

import contextlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sambasim.compiler.capture.step import Example
from sambasim.compiler.compile import Compiled, compile_model
from sambasim.errors import CaptureError, ModelError
from sambasim.options.compile import CompileOptions


def counter() -> Callable[[], int]:
    count = 0

    def counted() -> int:
        nonlocal count
        count += 1  # here
        return count

    return counted


CLOSURE = counter().__code__.co_firstlineno


Then: TypeAlias = Callable[[Any, Tensor], Tensor]


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
        self.linear = nn.Linear(4, 3)
        self.dropout = nn.Dropout()
        self.norm = nn.BatchNorm1d(3)
        self.then = then
        self.register_buffer("ema", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)
        self.plain = torch.zeros(())
        self.calls = 0
        self.hidden: Tensor | None = None
        self.keeper = Keeper()
        self.counted = counter()

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.linear(x)).square().mean()


NAMES = {**globals(), "checkpoint": torch.utils.checkpoint.checkpoint, "calls": 0, "of_python": random.Random(0)}
"""What the bodies below may name."""

READ, REPLACED = "which each call changes, and on which later calls depend", "which forward() replaces"
INFERENCE = "torch.inference_mode()"
CHECKPOINTED = "activation checkpointing that changes results"
REFUSED = {
    # what is said, the body
    "a parameter replaced": (REPLACED, "net.linear.bias = nn.Parameter(net.linear.bias * 0.5)  # here", "return h"),
    "a hidden state": (f"model.hidden, {READ}",
        "h, net.hidden = h + (0 if net.hidden is None else net.hidden), h.detach()  # here", "return h"),
    "a tensor for evaluation": (f"model.plain, {READ}",
        "if net.training: net.plain = h.detach().mean()  # here", "return h - net.plain"),
    "a global": (f"global calls, {READ}", "global calls", "calls += 1  # here", "return h / calls"),
    "a counter of the backward": (f"global calls, {READ}",
        "global calls", "calls += 1  # here", "return Faded.apply(h, 1 / calls)"),
    "a tensor in an object": (f"model.keeper.tensor, {READ}",
        "h, net.keeper.tensor = h + net.keeper.tensor, h.detach()  # here", "return h"),
    "a closure": (f"count of counted at test_state.py:{CLOSURE}, {READ}", "return h / net.counted()"),
    "its own numbers of Python": (f"global of_python, {READ}", "return h * of_python.random()  # here"),
    "a function in it": (INFERENCE, "return h + torch.inference_mode()(torch.ones)(3)  # here"),
    "a checkpoint without a gradient": (CHECKPOINTED,
        "return h + checkpoint(net.linear, torch.ones(2, 4), use_reentrant=True)  # here"),
    "torch.cond": ("torch.cond, which a PEF cannot hold",
        "return torch.cond(h.sum() > 0, lambda a: a * 2, lambda a: a.sin(), (h,))  # here"),
}  # fmt: skip
COMPILES = {
    # a slot that a notice names, the body
    "a backward of its own": ("", "return Faded.apply(h)"),
    "a hook of a gradient": ("", "if h.requires_grad: h.register_hook(lambda gradient: gradient * 0)", "return h"),
    "a buffer in place": ("", "net.ema += 1", "net.ema.mul_(0.9).add_(h.detach().mean())", "return h + net.ema"),
    "tensors made anew": ("model.extra", "net.plain, net.extra = h.detach(), h.mean()", "return h + net.extra"),
    "draws": ("", "return net.dropout(net.norm(h)) * torch.tensor([1.0, 2.0, 3.0]) + torch.rand(3)"),
}


def function_of(body: Sequence[str], folder: Path) -> Then:
    file = folder / "then.py"
    file.write_text("\n    ".join(("def then(net, h):", *body)), encoding="utf-8")
    names = dict(NAMES)
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), names)
    then: Then = names["then"]
    return then


def compiled(model: nn.Module | Then, folder: Path, batch: int = 2, **options: object) -> Compiled:
    model = model if isinstance(model, nn.Module) else Net(model)
    settings = {"pef_name": "net", "output_folder": folder, "optimizer": {"name": "sgd"}, **options}
    named = {"model": {"target": "net:Net"}, "data": {"source": "net:data"}}
    resolved = CompileOptions.model_validate({**named, **settings})
    return compile_model(model, Example({"x": torch.randn(batch, 4)}), resolved)


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_would_lose_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    said, *body = REFUSED[name]
    with pytest.raises(CaptureError) as caught:
        compiled(function_of(body, tmp_path), tmp_path)
    assert said in caught.value.what
    assert str(caught.value.where).endswith("# here")


@pytest.mark.parametrize("name", COMPILES)
def test_what_is_sound_compiles(name: str, tmp_path: Path) -> None:
    slot, *body = COMPILES[name]
    notices = compiled(function_of(body, tmp_path), tmp_path).notices
    told = [notice for notice in notices if "changed by each call" in notice]
    assert (len(told), slot in "".join(told)) == (bool(slot), True), told


# What the bodies above do in evaluation and inference alone, and what a model is beside its forward.


def test_evaluation_and_inference_refuse_state_too(tmp_path: Path) -> None:
    counts = function_of(("net.calls += 1", "return h * net.calls"), tmp_path)
    for then, options in ((lambda net, h: h if net.training else counts(net, h), {}), (counts, {"inference": True})):
        with pytest.raises(CaptureError, match=f"model.calls, {READ}"):
            compiled(then, tmp_path, **options)


@pytest.mark.parametrize("body", ["return Faded.apply(h)", "h.register_hook(torch.neg)\n    return h"])
def test_a_backward_of_the_users_own_is_captured_in_a_narrow_type(body: str, tmp_path: Path) -> None:
    body = f"if not h.requires_grad: return h\n    {body}"
    assert compiled(function_of((body,), tmp_path), tmp_path, dtype="bf16").program.training is not None


def test_hooks_of_modules_are_captured_and_those_of_parameters_refused(tmp_path: Path) -> None:
    net = Net()
    net.linear.register_full_backward_hook(lambda module, given, gradient: None)
    compiled(net, tmp_path)
    net.linear.weight.register_hook(lambda gradient: None)
    net.linear.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ModelError) as caught:
        compiled(net, tmp_path)
    for what in ("the parameter linear.weight has a gradient hook", "the parameter linear.bias has"):
        assert what in caught.value.what


def test_a_wrapped_model_is_refused_with_what_syncs_here(tmp_path: Path) -> None:
    class Wrapped(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:  # without a process group
            nn.Module.__init__(self)
            self.module = module

    with pytest.raises(ModelError, match="the model is wrapped in Wrapped") as caught:
        compiled(Wrapped(Net()), tmp_path)
    assert "--data-parallel" in str(caught.value.remedy)
    assert compiled(nn.DataParallel(Net()), tmp_path).program.training is not None


@pytest.mark.parametrize(
    ("options", "is_refused"),
    [
        ({}, False),
        ({"data_parallel": True}, True),
        ({"tensor_parallel": "batch", "n_chips": 2, "training": {"batch_size": 4}}, True),
        ({"inference": True}, False),
    ],
)
def test_statistics_over_all_replicas_are_refused_on_several(
    options: dict[str, Any], is_refused: bool, tmp_path: Path
) -> None:
    net: Any = Net()
    net.norm = nn.SyncBatchNorm(3)
    what = "the module norm is SyncBatchNorm, whose statistics are those of all replicas"
    with pytest.raises(ModelError, match=what) if is_refused else contextlib.nullcontext():
        compiled(net, tmp_path, **options)


def test_a_model_that_cannot_run_one_sample_compiles_and_says_so(tmp_path: Path) -> None:
    made = compiled(lambda net, h: functional.batch_norm(h, None, None, training=True), tmp_path, batch=4)
    assert made.program.single is None
    assert any("at batch 1: the last samples" in notice and "batch of 4" in notice for notice in made.notices)
    assert compiled(Net(), tmp_path).program.single is not None


@pytest.mark.parametrize("whole", [True, False], ids=["in training mode", "in evaluation mode as a whole"])
def test_modes_are_respected_and_restored(whole: bool, tmp_path: Path) -> None:
    net = Net(lambda net, h: net.norm(net.frozen(h)))
    net.frozen = nn.BatchNorm1d(3).eval()
    net.training = whole
    modes = [module.training for module in net.modules()]
    training = compiled(net, tmp_path).program.training
    assert [module.training for module in net.modules()] == modes
    assert training is not None
    updated = {output.symbol for output in training.outputs if "running_mean" in str(output.symbol)}
    assert len(updated) == (1 if whole else 2)
