"""What a capture would lose without a word is found before it; and what looks like it, and is sound, is left alone."""

# Calling a module gives Any.
# mypy: no-warn-return-any

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sambasim.compiler.compile import Compiled, compile_model
from sambasim.compiler.explain import lost_effects
from sambasim.compiler.step import TrainingStep
from sambasim.errors import CaptureError, ModelError
from sambasim.options.compile import CompileOptions
from tests.models import CASES, Case

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


def assigns_a_plain_tensor(net: Any, h: Tensor) -> Tensor:
    net.plain = net.plain + h.detach().mean()  # here
    return h + net.plain


def counts(net: Any, h: Tensor) -> Tensor:
    net.calls += 1  # here
    return h * net.calls


def adds_up(net: Any, h: Tensor) -> Tensor:
    net.total = net.total + h.detach().mean()  # here
    return h + net.total


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


LOST: tuple[tuple[Callable[[Any, Tensor], Tensor], str], ...] = (
    (assigns_a_buffer, STATE), (overwrites_a_buffer, STATE), (assigns_a_plain_tensor, STATE), (counts, STATE),
    (adds_up, STATE), (keeps_a_hidden_state, STATE), (keeps_for_evaluation, STATE), (replaces_a_parameter, STATE),
    (has_its_own_backward, "the backward of Reversed"), (hooks, "a gradient hook"),
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


SOUND = (changes_in_place, makes_anew, fills_a_cache)

EITHER = pytest.mark.parametrize("fake", [True, False], ids=["fake", "eager"])


def found(net: nn.Module, *, fake: bool) -> list[tuple[str, str]]:
    findings = lost_effects(TrainingStep(net, ("x",), None, False), [torch.randn(2, 4)], fake=fake)
    assert findings is not None
    return [(finding.obstacle.what, finding.where) for finding in findings]


@EITHER
@pytest.mark.parametrize(("then", "what"), LOST, ids=[then.__name__ for then, _ in LOST])
def test_what_is_lost_is_found_with_its_line(then: Callable[[Any, Tensor], Tensor], what: str, fake: bool) -> None:
    findings = found(Net(then), fake=fake)
    assert len(findings) == 1
    assert findings[0][0].startswith(what)
    assert findings[0][1].startswith(f"{__file__}:")
    assert findings[0][1].endswith("# here")


@EITHER
@pytest.mark.parametrize("then", SOUND)
def test_what_is_sound_is_left_alone(then: Callable[[Any, Tensor], Tensor], fake: bool) -> None:
    assert found(Net(then), fake=fake) == []


@EITHER
@pytest.mark.parametrize("then", [*(then for then, _ in LOST), *SOUND])
def test_nothing_is_changed(then: Callable[[Any, Tensor], Tensor], fake: bool) -> None:
    net = Net(then).train()
    attributes = [dict(vars(module)) for module in net.modules()]
    tensors = {name: (tensor, tensor.clone()) for name, tensor in net.state_dict(keep_vars=True).items()}
    apply = torch.autograd.Function.__dict__["apply"]
    generator, of_class = torch.get_rng_state(), dict(vars(nn.Module))
    found(net, fake=fake)
    assert torch.equal(torch.get_rng_state(), generator) is False  # the test's own torch.randn, and no more
    assert [dict(vars(module)) for module in net.modules()] == attributes
    assert net.seen == []
    for name, tensor in net.state_dict(keep_vars=True).items():
        assert tensor is tensors[name][0]
        assert torch.equal(tensor, tensors[name][1])
    assert dict(vars(nn.Module)) == of_class
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert "_calls" not in Tensor.register_hook.__qualname__
    assert Tensor.register_hook.__module__ == "torch._tensor"


def test_a_call_that_fake_tensors_cannot_make_says_nothing_and_an_eager_one_does() -> None:
    def asserts(net: Any, h: Tensor) -> Tensor:
        assert h.square().sum() >= 0
        return counts(net, h)

    step = TrainingStep(Net(asserts), ("x",), None, False)
    assert lost_effects(step, [torch.randn(2, 4)]) is None
    findings = lost_effects(step, [torch.randn(2, 4)], fake=False)
    assert findings is not None
    assert [finding.where.endswith("net.calls += 1  # here") for finding in findings] == [True]


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name)
def test_the_zoo_is_sound(one: Case) -> None:
    batch = one.batch(2)
    by_keyword = isinstance(batch, dict)
    tensors = list(batch.values()) if isinstance(batch, dict) else list(batch)
    names = list(batch) if isinstance(batch, dict) else [f"input_{index}" for index in range(len(tensors))]
    loss = {"cross_entropy": functional.cross_entropy, "mse": functional.mse_loss, None: None}[one.loss]
    assert lost_effects(TrainingStep(one.module(), names, loss, by_keyword), tensors) == []


def compiled(model: nn.Module, folder: Path, batch: int = 4, **options: object) -> Compiled:
    settings = {"pef_name": "net", "output_folder": folder, "optimizer": {"name": "sgd"}, **options}
    named = {"model": {"target": "net:Net"}, "data": {"source": "net:data"}}
    resolved = CompileOptions.model_validate({**named, **settings})
    return compile_model(model, {"x": torch.randn(batch, 4)}, resolved, by_keyword=False)


def test_a_compilation_refuses_what_would_be_lost(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="the training step cannot be captured: state that forward"):
        compiled(Net(counts), tmp_path)


def test_an_inference_program_refuses_state_and_takes_a_backward_of_the_users_own(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="the evaluation graph cannot be captured: state that forward"):
        compiled(Net(counts), tmp_path, inference=True)
    assert compiled(Net(has_its_own_backward), tmp_path, inference=True).program.training is None


def test_state_of_evaluation_alone_is_refused(tmp_path: Path) -> None:
    def counts_in_evaluation(net: Any, h: Tensor) -> Tensor:
        return h if net.training else counts(net, h)

    with pytest.raises(CaptureError, match="the evaluation graph cannot be captured: state that forward"):
        compiled(Net(counts_in_evaluation), tmp_path)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_of_a_parameter_is_refused(register: str, tmp_path: Path) -> None:
    net = Net(changes_in_place)
    getattr(net.linear.weight, register)(lambda gradient: None)
    with pytest.raises(ModelError, match=r"the parameter linear\.weight has a gradient hook"):
        compiled(net, tmp_path)


def test_a_backward_hook_of_a_module_is_refused(tmp_path: Path) -> None:
    net = Net(changes_in_place)
    net.linear.register_full_backward_hook(lambda module, given, gradient: None)
    with pytest.raises(ModelError, match="the module linear has a backward hook"):
        compiled(net, tmp_path)


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


def normalizes(net: Any, h: Tensor) -> Tensor:
    return functional.batch_norm(h, None, None, training=True)


def test_a_model_that_cannot_run_one_sample_compiles_and_says_so(tmp_path: Path) -> None:
    made = compiled(Net(normalizes), tmp_path)
    assert made.program.single is None
    assert any("at batch 1: the last samples" in notice and "batch of 4" in notice for notice in made.notices)
    assert made.program.evaluation is not None


def test_a_model_that_runs_one_sample_has_the_graph_for_it(tmp_path: Path) -> None:
    made = compiled(Net(changes_in_place), tmp_path)
    assert made.program.single is not None
    assert made.notices == ()


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
