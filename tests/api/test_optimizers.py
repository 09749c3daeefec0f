"""An optimizer of torch trains as in an eager loop, with its groups and its scheduler; one whose step is more or other
than torch's is refused, with what to type instead."""

import re
from collections.abc import Callable, Sequence
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, Adam, AdamW, lr_scheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import sambasim as ss
from sambasim.commands.torch_optimizers import taken_over
from tests.api.conftest import BATCH, IN_ORDER, TRAIN, batches, compiled, eager, net, sgd, trained
from tests.support.whole import whole_case

pytestmark = pytest.mark.usefixtures("one_thread")

MakesScheduler = Callable[[Optimizer], Any]
STEPS = 10
LENGTH = 12


def wanted(optimizer: Optimizer, model: nn.Module, **options: Any) -> list[float]:
    return eager(model, optimizer, batches(*TRAIN, STEPS, 32), **options)


def run(folder: Path, model: nn.Module, optimizer: Optimizer, **options: Any) -> list[float]:
    pef = compiled(folder, model, loss="cross_entropy", optimizer=optimizer, **options)
    return trained(pef, steps=STEPS, **IN_ORDER).losses


def refused(folder: Path, model: nn.Module, optimizer: Optimizer) -> ss.SambasimError:
    with pytest.raises(ss.SambasimError) as error:
        run(folder, model, optimizer)
    return error.value


def _warm_cosine(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(optimizer, LENGTH)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[4])


def _stepped(optimizer: Optimizer) -> lr_scheduler.LRScheduler:
    scheduler = lr_scheduler.StepLR(optimizer, 3, 0.5)
    for _ in range(6):  # the rates go on from here
        optimizer.step()
        scheduler.step()
    return scheduler


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.LinearLR(o, 1 / 3, total_iters=5),
        lambda o: lr_scheduler.LinearLR(o, 1, 0.1, total_iters=LENGTH),
        lambda o: lr_scheduler.CosineAnnealingLR(o, LENGTH, eta_min=0.01),
        lambda o: lr_scheduler.PolynomialLR(o, LENGTH),
        lambda o: lr_scheduler.StepLR(o, 3, 0.5),
        lambda o: lr_scheduler.ExponentialLR(o, 0.8),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: min((step + 1) / 4, 1)),
        lambda o: lr_scheduler.LambdaLR(o, (lambda length: lambda step: min(step / length, 1.0))(4)),
        lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.7),
        _warm_cosine,
        _stepped,
    ],
)  # fmt: skip
def test_a_scheduler_is_taken_over(make: MakesScheduler, folder: Path) -> None:
    model = net()
    optimizer = sgd(model, 0.3)
    scheduler = make(optimizer)
    pef = compiled(folder, model, loss="cross_entropy", optimizer=optimizer)
    (notice,) = (notice for notice in pef.notices if "the learning rate follows" in notice)
    said = re.search(r"follows (\w+) of the optimizer: lr [\d.]+, schedule.name .* \(equal in ([\d,]+) steps", notice)
    assert said is not None, notice
    assert (said[1], int(said[2].replace(",", "")) >= STEPS) == (type(scheduler).__name__, True)
    ours = trained(pef, steps=STEPS, **IN_ORDER).losses
    assert ours == pytest.approx(wanted(optimizer, model, scheduler=scheduler), rel=1e-5)


def _groups(model: nn.Module) -> Optimizer:
    first, *_, last = model.children()
    groups: Any = [{"params": first.parameters(), "lr": 0.3}, {"params": last.parameters(), "lr": 0.05}]
    return SGD(groups, momentum=0.9)


def test_a_scheduler_of_groups_multiplies_the_rate_of_each(folder: Path) -> None:
    model = net()
    optimizer = _groups(model)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: step / 4 if step < 4 else 1.0)
    pef = compiled(folder, model, loss="cross_entropy", optimizer=optimizer)
    assert "LambdaLR of the optimizer: lr 0.3 and lr 0.05, schedule.name constant" in " ".join(pef.notices)
    ours = trained(pef, steps=STEPS, **IN_ORDER).losses
    assert ours == pytest.approx(wanted(optimizer, model, scheduler=scheduler), rel=1e-5)


def test_what_is_given_for_the_rates_overrides_a_scheduler(folder: Path) -> None:
    model, other = net(), net()
    optimizer = sgd(model, 0.3)
    scheduler = lr_scheduler.StepLR(optimizer, 3)
    given: dict[str, Any] = {"lr_schedule": "constant", "warmup_steps": 4, "lr": 0.2}
    pef = compiled(folder, model, loss="cross_entropy", optimizer=optimizer, **given)
    assert not pef.notices
    plain = sgd(other, 0.2)
    linear = lr_scheduler.LambdaLR(plain, lambda step: min((step + 1) / 4, 1))
    assert trained(pef, steps=STEPS, **IN_ORDER).losses == pytest.approx(
        wanted(plain, other, scheduler=linear), rel=1e-5
    )
    del scheduler


def test_a_scheduler_that_no_schedule_goes_on_from_says_why(folder: Path) -> None:
    model = net()
    optimizer = _groups(model)
    scheduler: Any = lr_scheduler.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 0.8**step])
    assert "give all the same factor" in str(refused(folder, model, optimizer).remedy)
    optimizer = sgd(model)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, LENGTH)
    optimizer.step()
    scheduler.step()
    assert "it has stepped before" in str(refused(folder, model, optimizer).remedy)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=STEPS),
        lambda o: lr_scheduler.MultiStepLR(o, [3, 5], 0.5),
        lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=5),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0 if step < 900 else 0.1),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: (10 / max(step, 10)) ** 0.5),
        lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.3, 4, cycle_momentum=False),
        lr_scheduler.ReduceLROnPlateau,
    ],
)  # fmt: skip
def test_a_scheduler_without_an_equal_is_refused_as_one(make: MakesScheduler, folder: Path) -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.3, momentum=0.9)
    scheduler = make(optimizer)
    error = refused(folder, model, optimizer)
    assert f"a learning rate scheduler, {type(scheduler).__name__}" in error.what
    near = {"OneCycleLR": "warmup_steps=", "MultiStepLR": "step_size", "ReduceLROnPlateau": "stop_after=N"}
    assert re.search(f"lr_schedule.*{near.get(type(scheduler).__name__, 'cosine')}.*run in parts", str(error.remedy))
    del scheduler


@pytest.mark.parametrize(
    ("make", "equal", "length"),
    [
        (lambda o: lr_scheduler.CosineAnnealingLR(o, 10), 11, {"steps": 12}),
        (lambda o: lr_scheduler.LambdaLR(o, lambda s: (1 + cos(pi * (s - 5) / 35)) / 2 if s > 5 else (s + 1) / 6),
         41, {"set": {"training.steps": 70}}),
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 - step / 10), 11, {"steps": 30}),  # and below 0
    ],
)  # fmt: skip
def test_a_scheduler_that_differs_within_the_known_steps_is_refused(
    make: MakesScheduler, equal: int, length: dict[str, Any], folder: Path
) -> None:
    optimizer = sgd(net())
    scheduler = make(optimizer)
    taken = taken_over([optimizer], equal)
    assert taken is not None
    assert taken.steps == equal
    with pytest.raises(ss.SambasimError, match=f"rate scheduler, {type(scheduler).__name__}"):
        taken_over([optimizer], equal + 1)
    model = net()
    optimizer = sgd(model)
    scheduler = make(optimizer)
    with pytest.raises(ss.SambasimError, match=f"rate scheduler, {type(scheduler).__name__}"):
        compiled(folder, model, loss="cross_entropy", optimizer=optimizer, **length)


def test_notices_are_printed_and_a_rate_of_0_to_the_end_is_one(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = net()
    optimizer = sgd(model)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 5)
    own: dict[str, Any] = {"check": 0, "output_folder": folder, "name": "told"}
    pef = ss.compile(model, BATCH, loss="cross_entropy", optimizer=optimizer, **own)
    assert "notice: the learning rate follows CosineAnnealingLR of the optimizer: lr 0.1" in capfd.readouterr().err
    ss.run(pef, TRAIN, steps=9, **IN_ORDER)
    said = "the learning rate is 0 from step 6 of 9 on: training.schedule counts optimizer steps, not epochs; "
    assert f'notice: {said}set={{"training.schedule.total_steps": 9}}\n' in capfd.readouterr().out
    assert "learning rate is 0" not in str(trained(pef, steps=5, **IN_ORDER).summary.notices)
    assert capfd.readouterr() == ("", "")
    del scheduler


def test_a_scheduler_that_is_gone_has_changed_the_rate(folder: Path) -> None:
    model = net()
    optimizer = sgd(model, 0.3)
    lr_scheduler.LinearLR(optimizer, 0.1)
    assert "which is gone by now, and a run would keep its rate of now, 0.03" in refused(folder, model, optimizer).what


def test_parts_of_a_run_with_rates_of_their_own_are_what_the_remedy_says(folder: Path, tmp_path: Path) -> None:
    model = net()
    pef = compiled(folder, model, loss="cross_entropy", optimizer=sgd(model, 0.3))
    order = {**IN_ORDER, "checkpoint_dir": tmp_path}
    losses = trained(pef, steps=4, **order).losses
    losses += trained(pef, steps=STEPS, resume="newest", lr=0.03, **order).losses
    optimizer = sgd(model, 0.3)
    scheduler = lr_scheduler.MultiStepLR(optimizer, [4], 0.1)
    assert losses == pytest.approx(wanted(optimizer, model, scheduler=scheduler), rel=1e-5)


def test_a_schedule_that_ends_with_a_longer_run_says_its_new_rates(folder: Path, tmp_path: Path) -> None:
    model = net()
    pef = compiled(folder, model, loss="cross_entropy", optimizer=sgd(model, 0.3), lr_schedule="linear")
    order = {**IN_ORDER, "checkpoint_dir": tmp_path / "a", "resume": "if-any"}
    parts = [trained(pef, steps=steps, **order) for steps in (4, STEPS)]
    said = (
        f"the linear schedule ends with the run, after {STEPS} steps and no longer 4: the factor of the learning rate"
    )
    remedy = f'set={{"training.schedule.total_steps": {STEPS}}}'
    assert any(f"{said} is 0.6 from here, not 0; {remedy}" in notice for notice in parts[1].summary.notices)
    fixed = {"data.shuffle": False, "training.schedule.total_steps": STEPS}
    order |= {"checkpoint_dir": tmp_path / "b", "set": fixed, "lr_schedule": "cosine", "warmup_steps": 2}
    parts = [trained(pef, steps=steps, **order) for steps in (4, STEPS)]
    assert "ends with the run" not in str(parts[1].summary.notices)
    whole = trained(pef, steps=STEPS, **{**order, "checkpoint_dir": None, "resume": None}).losses
    assert [loss for part in parts for loss in part.losses] == whole


def _without_decay(model: nn.Module) -> Sequence[Optimizer]:
    named = [*model.named_parameters()]
    decayed, others = ([p for _, p in named if (p.ndim > 1) is is_matrix] for is_matrix in (True, False))
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return [AdamW(groups, lr=0.01, fused=True)]


def _layer_wise(model: nn.Module) -> Sequence[Optimizer]:
    layers = [layer for layer in model.children() if isinstance(layer, nn.Linear)]
    groups: Any = [{"params": layer.parameters(), "lr": 0.1 / (1 + depth)} for depth, layer in enumerate(layers)]
    return [SGD(groups, momentum=0.9, fused=True)]


def _several(model: nn.Module) -> Sequence[Optimizer]:
    first, *_, last = model.children()
    return [Adam(first.parameters(), lr=0.01, fused=True), SGD(last.parameters(), lr=0.1, momentum=0.9, fused=True)]


def _frozen(model: nn.Module) -> Sequence[Optimizer]:
    first, *_, last = model.children()
    first.requires_grad_(False)
    groups: Any = [{"params": first.parameters(), "lr": 9.0}, {"params": last.parameters()}]
    return [SGD(groups, lr=0.1, fused=True)]


@pytest.mark.parametrize("make", [_without_decay, _layer_wise, _several, _frozen])
def test_groups_and_several_optimizers_train_as_in_an_eager_loop(
    make: Callable[[nn.Module], Sequence[Optimizer]], folder: Path, tmp_path: Path
) -> None:
    model, losses = net(), []
    given = make(model)
    pef = compiled(folder, model, loss="cross_entropy", optimizer=given if len(given) > 1 else given[0])
    for x, y in batches(*TRAIN, STEPS, 32):
        loss = nn.functional.cross_entropy(model(x), y)
        for optimizer in given:
            optimizer.zero_grad()
        torch.autograd.backward(loss)
        for optimizer in given:
            optimizer.step()
        losses.append(loss.item())
    whole = trained(pef, steps=STEPS, **IN_ORDER).losses
    assert whole == pytest.approx(losses, rel=1e-6)  # torch rounds the last elements of a tensor in another way
    parts = [trained(pef, steps=4, checkpoint_dir=tmp_path, **IN_ORDER)]
    parts.append(trained(pef, steps=STEPS, checkpoint_dir=tmp_path, resume="newest", **IN_ORDER))
    assert [loss for part in parts for loss in part.losses] == whole


def _does_nothing(*given: object) -> None:
    """A hook, or a step."""


class Halved(SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def _changed(change: Callable[[Any], object]) -> Callable[[nn.Module], Optimizer]:
    def made(model: nn.Module) -> Optimizer:
        optimizer = sgd(model)
        change(optimizer)
        return optimizer

    return made


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (_changed(lambda o: o.register_step_pre_hook(_does_nothing)), "SGD has a step pre hook, _does_nothing"),
        (_changed(lambda o: o.register_step_post_hook(lambda *given: None)), "SGD has a step post hook, "),
        (_changed(lambda o: o.register_state_dict_post_hook(_does_nothing)), "SGD has a state dict post hook"),
        (_changed(lambda o: o.register_load_state_dict_pre_hook(_does_nothing)), "has a load state dict pre hook"),
        (_changed(lambda o: setattr(o, "step", _does_nothing)), "step of torch.optim.SGD is not torch's"),
        (_changed(lambda o: setattr(o, "zero_grad", _does_nothing)), "zero_grad of torch.optim.SGD is not torch's"),
        (_changed(lambda o: o.param_groups[0].update(lr_scale=0.1)), "SGD has lr_scale, which is no option"),
        (_changed(lambda o: o.param_groups[0]["params"].append(o.param_groups[0]["params"][0])), "has 0.weight twice"),
        (lambda model: Halved(model.parameters(), lr=0.1), "step of torch.optim.SGD is not torch's, but Halved.step"),
        (lambda model: type("AdamW", (AdamW,), {"step": _does_nothing})(model.parameters()), "AdamW is not torch's"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "a PEF has no optimizer LBFGS"),
        (lambda model: SGD(model.parameters(), differentiable=True), "does not have differentiable"),
        (lambda model: SGD([*model.parameters(), nn.Parameter(torch.zeros(1))]), "SGD updates 1 parameters"),
    ],
)  # fmt: skip
def test_a_step_that_is_not_torchs_is_refused_by_name(
    make: Callable[[nn.Module], Optimizer], what: str, folder: Path
) -> None:
    model = net()
    error = refused(folder, model, make(model))
    assert what in error.what
    assert error.remedy
    if "_does_nothing" in error.what:
        assert "def _does_nothing" in str(error.where)


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_a_hook_of_all_optimizers_is_refused(register: Callable[..., Any], folder: Path) -> None:
    model = net()
    with register(_does_nothing):
        what = refused(folder, model, sgd(model)).what
    assert re.search("SGD has a step (pre|post) hook, _does_nothing", what)


def test_a_class_of_torch_with_another_step_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    optimizer = SGD(model.parameters())
    monkeypatch.setattr(SGD, "step", _does_nothing)
    assert "step of torch.optim.SGD is not torch's, but _does_nothing" in refused(folder, model, optimizer).what


def test_the_remedy_for_a_hook_that_clips(folder: Path) -> None:
    model, other = net(), net()
    optimizer = sgd(model, 0.3)

    def clips(*given: object) -> None:
        clip_grad_norm_(model.parameters(), 0.1)

    with optimizer.register_step_pre_hook(clips):
        assert "max_grad_norm=1.0" in str(refused(folder, model, optimizer).remedy)
    ours = run(folder, model, optimizer, max_grad_norm=0.1)
    assert ours == pytest.approx(wanted(sgd(other, 0.3), other, clip=0.1), rel=1e-5)


@pytest.mark.parametrize("how", [{}, whole_case({"foreach": True}), whole_case({"fused": True})])
@pytest.mark.parametrize("kind", [SGD, Adam, AdamW, torch.optim.Adagrad])
def test_an_optimizer_as_torch_makes_it_trains_as_it_does(kind: Any, how: dict[str, bool], folder: Path) -> None:
    model, other = net(), net()
    optimizer = kind([{"params": [*model.named_parameters()], "name": "all"}], lr=0.05, **how)
    optimizer.label = "mine"  # torch reads no attribute of this name
    before = str(optimizer.state)
    assert run(folder, model, optimizer) == pytest.approx(wanted(kind(other.parameters(), lr=0.05), other), rel=1e-5)
    assert str(optimizer.state) == before
