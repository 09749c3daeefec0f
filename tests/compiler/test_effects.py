"""What a capture would lose silently is found, with its line; what is sound is left alone."""

# Calling a module gives Any.
# mypy: no-warn-return-any

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from sambasim.compiler.compile import Compiled, compile_model
from sambasim.compiler.effects import lost_effects
from sambasim.compiler.step import TrainingStep
from sambasim.errors import CaptureError, ModelError
from sambasim.options.compile import CompileOptions

STATE = "state that forward() keeps by assignment"


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Net(nn.Module):
    """A linear layer, whose outputs `then` makes into something, and their mean square."""

    def __init__(self, then: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.then = then
        self.register_buffer("ema", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)
        self.plain = torch.zeros(())
        self.total = 0.0
        self.calls = 0
        self.hidden: Tensor | None = None
        self.cache: Tensor | None = None
        self.seen: list[Tensor] = []
        self.warned = False

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self, self.linear(x)).square().mean()


def assigns_a_buffer(net: Any, h: Tensor) -> Tensor:
    net.ema = 0.9 * net.ema + h.detach().mean()  # here
    return h + net.ema


def overwrites_a_buffer(net: Any, h: Tensor) -> Tensor:
    net.ema = h.detach().mean()  # here
    return h


def counts(net: Any, h: Tensor) -> Tensor:
    net.calls += 1  # here
    return h * net.calls


def keeps_a_hidden_state(net: Any, h: Tensor) -> Tensor:
    h = h if net.hidden is None else h + net.hidden
    net.hidden = h.detach()  # here
    return h


def keeps_for_evaluation(net: Any, h: Tensor) -> Tensor:
    if net.training:
        net.plain = h.detach().mean()  # here
        return h - h.mean()
    return h - net.plain


def replaces_a_parameter(net: Any, h: Tensor) -> Tensor:
    net.linear.bias = nn.Parameter(net.linear.bias * 0.5)  # here
    return h


def has_its_own_backward(net: Any, h: Tensor) -> Tensor:
    return Reversed.apply(h)  # type: ignore[no-untyped-call]  # torch's, untyped  # here


def hooks(net: Any, h: Tensor) -> Tensor:
    h.register_hook(lambda gradient: gradient * 0)  # type: ignore[no-untyped-call]  # torch's, untyped  # here
    return h


def inference_mode(net: Any, h: Tensor) -> Tensor:
    with torch.inference_mode():  # here
        return h + net.linear.weight.sum()


@torch.inference_mode()
def decorated(h: Tensor) -> Tensor:
    return h + 1


def calls_what_is_decorated(net: Any, h: Tensor) -> Tensor:
    return h + decorated(h).clone()  # here


def seeds(net: Any, h: Tensor) -> Tensor:
    torch.manual_seed(3)  # here
    return h + torch.randn(3)


def forks(net: Any, h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):  # here
        return h + torch.randn(3)


def draws_from_its_own(net: Any, h: Tensor) -> Tensor:
    return h + torch.randn(3, generator=GENERATOR)  # here


def changes_what_is_saved(net: Any, h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 2, lambda saved: saved):  # here
        return h.sigmoid()


GENERATOR = torch.Generator().manual_seed(1)
STATE_OF_BACKWARD = {"calls": 0}


class Faded(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, rate: float) -> Tensor:
        context.rate = rate
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * context.rate, None  # here


class WithoutZeros(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        context.set_materialize_grads(False)  # here
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


def counts_for_the_backward(net: Any, h: Tensor) -> Tensor:
    STATE_OF_BACKWARD["calls"] += 1
    return Faded.apply(h, 1 / STATE_OF_BACKWARD["calls"])  # type: ignore[no-untyped-call]  # torch's, untyped


def leaves_out_zeros(net: Any, h: Tensor) -> Tensor:
    return WithoutZeros.apply(h)  # type: ignore[no-untyped-call]  # torch's, untyped


def checkpoints_without_random_state(net: Any, h: Tensor) -> Tensor:
    return checkpoint(torch.sigmoid, h, use_reentrant=False, preserve_rng_state=False)  # here


def checkpoints_without_a_gradient(net: Any, h: Tensor) -> Tensor:
    return h + checkpoint(net.linear, torch.ones(2, 4), use_reentrant=True)  # here


def counts_by_version(net: Any, h: Tensor) -> Tensor:
    return h * (1 + net.linear.weight._version)  # here


LOST: tuple[tuple[Callable[[Any, Tensor], Tensor], str], ...] = (
    *((then, STATE) for then in (assigns_a_buffer, overwrites_a_buffer, counts, keeps_a_hidden_state)),
    (keeps_for_evaluation, STATE), (replaces_a_parameter, STATE),
    (hooks, "a gradient hook"), (changes_what_is_saved, "hooks on the tensors that are saved"),
    (counts_for_the_backward, "a value that differs from call to call"), (leaves_out_zeros, "set_materialize_grads"),
    (checkpoints_without_random_state, "activation checkpointing that changes results"),
    (checkpoints_without_a_gradient, "activation checkpointing that changes results"),
    (counts_by_version, "_version"),
    (seeds, "a seed"), (forks, "a seed"), (draws_from_its_own, "a torch.Generator of its own"),
    (inference_mode, "torch.inference_mode()"), (calls_what_is_decorated, "torch.inference_mode()"),
)  # fmt: skip


def changes_in_place(net: Any, h: Tensor) -> Tensor:
    net.ema += 1
    net.ema.mul_(0.9).add_(h.detach().mean())
    return h + net.ema


def makes_anew(net: Any, h: Tensor) -> Tensor:
    net.total = h.square().mean()
    net.plain = h.detach()
    net.scratch = h.detach()
    net.extra = h.mean()
    return h + net.total + net.scratch + net.extra


def fills_a_cache(net: Any, h: Tensor) -> Tensor:
    if net.cache is None or net.cache.shape != h.shape:
        net.cache = torch.arange(h.numel()).view(h.shape) / h.numel()
    net.seen.append(h)
    net.warned = not net.warned
    net.calls = net.calls * 1
    return h + net.cache


EITHER = pytest.mark.parametrize("fake", [True, False], ids=["fake", "eager"])


def found(net: Net, *, fake: bool) -> list[tuple[str, str]]:
    """The findings. Checks that the call has left nothing behind."""
    attributes = [dict(vars(module)) for module in net.modules()]
    tensors = {name: (tensor, tensor.clone()) for name, tensor in net.state_dict(keep_vars=True).items()}
    apply, of_class = torch.autograd.Function.__dict__["apply"], dict(vars(nn.Module))
    x, generator = torch.ones(2, 4), torch.get_rng_state()
    findings = lost_effects(TrainingStep(net, ("x",), None, False), [x], fake=fake)
    assert findings is not None
    assert torch.equal(torch.get_rng_state(), generator)
    assert [dict(vars(module)) for module in net.modules()] == attributes
    assert net.seen == []
    for name, tensor in net.state_dict(keep_vars=True).items():
        assert tensor is tensors[name][0]
        assert torch.equal(tensor, tensors[name][1])
    assert dict(vars(nn.Module)) == of_class
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert Tensor.register_hook.__module__ == "torch._tensor"
    return [(finding.obstacle.what, finding.where) for finding in findings]


@EITHER
@pytest.mark.parametrize(("then", "what"), LOST, ids=[then.__name__ for then, _ in LOST])
def test_what_is_lost_is_found_with_its_line(then: Callable[[Any, Tensor], Tensor], what: str, fake: bool) -> None:
    findings = found(Net(then), fake=fake)
    assert len(findings) == 1
    assert findings[0][0].startswith(what)
    assert findings[0][1].startswith(f"{__file__}:")
    assert findings[0][1].endswith("# here")


def test_a_backward_of_the_users_own_is_lost_in_a_narrow_type(tmp_path: Path) -> None:
    assert compiled(Net(has_its_own_backward), tmp_path).program.training is not None
    with pytest.raises(CaptureError, match=r"the backward of Reversed, a torch\.autograd\.Function, with --dtype"):
        compiled(Net(has_its_own_backward), tmp_path, dtype="bf16")


def test_torch_cond_is_refused_with_a_rewrite(tmp_path: Path) -> None:
    def chooses(net: Any, h: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(h.sum() > 0, lambda a: a * 2, lambda a: a.sin(), (h,))
        return chosen

    with pytest.raises(CaptureError, match=r"torch\.cond, which a PEF cannot hold") as caught:
        compiled(Net(chooses), tmp_path)
    assert "torch.where" in str(caught.value.remedy)


@EITHER
def test_what_is_sound_is_left_alone(fake: bool) -> None:
    for then in (changes_in_place, makes_anew, fills_a_cache):
        assert found(Net(then), fake=fake) == []


def compiled(model: nn.Module, folder: Path, batch: int = 4, **options: object) -> Compiled:
    settings = {"pef_name": "net", "output_folder": folder, "optimizer": {"name": "sgd"}, **options}
    named = {"model": {"target": "net:Net"}, "data": {"source": "net:data"}}
    resolved = CompileOptions.model_validate({**named, **settings})
    return compile_model(model, {"x": torch.randn(batch, 4)}, resolved, by_keyword=False)


def test_an_inference_program_refuses_state_and_takes_a_backward_of_the_users_own(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="the evaluation graph cannot be captured: state that forward"):
        compiled(Net(counts), tmp_path, inference=True)
    assert compiled(Net(has_its_own_backward), tmp_path, inference=True).program.training is None


def test_state_of_evaluation_alone_is_refused(tmp_path: Path) -> None:
    def counts_in_evaluation(net: Any, h: Tensor) -> Tensor:
        return h if net.training else counts(net, h)

    with pytest.raises(CaptureError, match="the evaluation graph cannot be captured: state that forward"):
        compiled(Net(counts_in_evaluation), tmp_path)


def test_hooks_of_parameters_and_modules_are_refused_together(tmp_path: Path) -> None:
    net = Net(changes_in_place)
    net.linear.weight.register_hook(lambda gradient: None)  # type: ignore[no-untyped-call]  # torch's, untyped
    net.linear.bias.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]  # so too
    net.linear.register_full_backward_hook(lambda module, given, gradient: None)
    with pytest.raises(ModelError) as caught:
        compiled(net, tmp_path)
    for what in (
        "the parameter linear.weight has a gradient",
        "the parameter linear.bias has",
        "the module linear has",
    ):
        assert what in caught.value.what


def test_a_wrapped_model_is_refused_with_what_syncs_here(tmp_path: Path) -> None:
    class Wrapped(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:  # without a process group
            nn.Module.__init__(self)
            self.module = module

    net = Net(changes_in_place)
    with pytest.raises(ModelError, match="the model is wrapped in Wrapped") as caught:
        compiled(Wrapped(net), tmp_path)
    assert "--data-parallel" in str(caught.value.remedy)
    assert compiled(nn.DataParallel(net), tmp_path).program.training is not None


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
    net = Net(changes_in_place)
    net.norm = nn.SyncBatchNorm(3)
    if not is_refused:
        compiled(net, tmp_path, **options)
        return
    with pytest.raises(
        ModelError, match="the module norm is SyncBatchNorm, whose statistics are those of all replicas"
    ):
        compiled(net, tmp_path, **options)


def test_a_model_that_cannot_run_one_sample_compiles_and_says_so(tmp_path: Path) -> None:
    def normalizes(net: Any, h: Tensor) -> Tensor:
        return functional.batch_norm(h, None, None, training=True)

    made = compiled(Net(normalizes), tmp_path)
    assert made.program.single is None
    assert any("at batch 1: the last samples" in notice and "batch of 4" in notice for notice in made.notices)
    other = compiled(Net(changes_in_place), tmp_path)
    assert other.program.single is not None
    assert other.notices == ()


class Frozen(nn.Module):
    """BatchNorm twice, of which the first one may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.BatchNorm1d(4)
        self.free = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.free(self.frozen(x)).square().mean()


@pytest.mark.parametrize("whole", [True, False], ids=["in training mode", "in evaluation mode as a whole"])
def test_modes_are_respected_and_restored(whole: bool, tmp_path: Path) -> None:
    model = Frozen()
    model.frozen.eval()
    model.training = whole
    modes = [module.training for module in model.modules()]
    training = compiled(model, tmp_path).program.training
    assert [module.training for module in model.modules()] == modes
    assert training is not None
    updated = {output.symbol for output in training.outputs if "running_mean" in str(output.symbol)}
    assert len(updated) == (1 if whole else 2)
