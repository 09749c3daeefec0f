"""The learning rate of every step, against the schedulers of torch.optim, and what DeepSpeed says of its own.

Those multiply one step's rate into the next one's, and ours is worked out anew at each step: the two agree to 1e-12,
and to the bit where torch works its own out anew too (LambdaLR, in test_eager.py).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR, StepLR

from sambasim.options.schedules import ScheduleOptions
from tests.support.deepspeed import one_cycle, warmup_decay_lr

RATE, STEPS, WARMUP = 0.3, 40, 8

Make = Callable[[torch.optim.Optimizer, int], LRScheduler]
"""The scheduler of an optimizer, for so many steps after the warm-up."""

SCHEDULES: dict[str, tuple[dict[str, Any], Make]] = {
    "constant": ({"name": "constant"}, lambda optimizer, steps: ConstantLR(optimizer, factor=1.0)),
    "linear": ({"name": "linear"}, lambda optimizer, steps: LinearLR(optimizer, 1.0, 0.0, steps)),
    "linear to a tenth": (
        {"name": "linear", "final_factor": 0.1}, lambda optimizer, steps: LinearLR(optimizer, 1.0, 0.1, steps)),
    "cosine": ({"name": "cosine"}, lambda optimizer, steps: CosineAnnealingLR(optimizer, steps)),
    "cosine to a tenth": (
        {"name": "cosine", "final_factor": 0.1},
        lambda optimizer, steps: CosineAnnealingLR(optimizer, steps, eta_min=0.1 * RATE)),
    "step": ({"name": "step", "step_size": 7, "gamma": 0.5}, lambda optimizer, steps: StepLR(optimizer, 7, gamma=0.5)),
}  # fmt: skip


@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_torch(name: str, warmup: int) -> None:
    fields, make = SCHEDULES[name]
    schedule = ScheduleOptions(**fields, warmup_steps=warmup)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=RATE)
    scheduler: LRScheduler
    if warmup:
        # The first step of a warm-up has 1/8 of the rate, and its last one all of it.
        first = LinearLR(optimizer, start_factor=1 / WARMUP, end_factor=1.0, total_iters=WARMUP - 1)
        scheduler = SequentialLR(optimizer, [first, make(optimizer, STEPS - WARMUP)], milestones=[WARMUP])
    else:
        scheduler = make(optimizer, STEPS)
    theirs = []
    for _ in range(STEPS):
        theirs.append(float(scheduler.get_last_lr()[0]))
        optimizer.step()
        scheduler.step()
    ours = [RATE * schedule.factor(step, STEPS) for step in range(STEPS)]
    assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-15)
    assert ours[max(warmup - 1, 0)] == ours[warmup] == RATE
    assert (len(set(ours[warmup:])) == 1) == (name == "constant")


def test_the_length_of_a_schedule_may_be_given_and_its_end_stays() -> None:
    """Torch's cosine rises again after its end; ours stays there."""
    schedule = ScheduleOptions(name="cosine", total_steps=10, final_factor=0.2)
    factors = [schedule.factor(step, 1000) for step in (5, 10, 11, 500)]
    assert factors == pytest.approx([0.6, 0.2, 0.2, 0.2])


def test_a_warm_up_may_begin_at_zero_as_in_recipes_with_lambdas() -> None:
    schedule = ScheduleOptions(warmup_steps=WARMUP, start_factor=0)
    factors = [schedule.factor(step, STEPS) for step in range(STEPS)]
    assert factors == [min(step / WARMUP, 1.0) for step in range(STEPS)]


def test_a_cycle_is_that_which_deepspeed_documents() -> None:
    """The rates of all schedules of DeepSpeed are compared in test_deepspeed.py."""
    schedule = ScheduleOptions(name="one_cycle", up_steps=9, start_factor=0.1, momentum=(0.85, 0.95))
    for update in range(STEPS):
        cycle: dict[str, Any] = {"cycle_first_step_size": 9, "cycle_min_mom": 0.85, "cycle_max_mom": 0.95}
        lr, beta1 = one_cycle(update - 1, 0.03, RATE, **cycle)
        assert RATE * schedule.factor(update, STEPS) == pytest.approx(lr, rel=1e-12, abs=1e-15)
        assert schedule.beta1(update) == pytest.approx(beta1, rel=1e-12)
    assert ScheduleOptions(name="one_cycle", up_steps=9).beta1(3) is None


@pytest.mark.parametrize("total", [30, None])
def test_a_decay_ends_at_zero_and_lasts_as_long_as_the_run(total: int | None) -> None:
    schedule = ScheduleOptions(name="warmup_decay", warmup_steps=1, total_steps=total)
    for update in range(STEPS):
        lr, _ = warmup_decay_lr(update - 1, total or STEPS, warmup_max_lr=RATE, warmup_num_steps=1)
        assert RATE * schedule.factor(update, STEPS) == pytest.approx(lr, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": "range_test"}, "step_size: is missing; rate: is missing"),
        ({"name": "one_cycle"}, "up_steps: is missing"),
        ({"name": "one_cycle", "up_steps": 3, "rate": 0.1}, "rate: needs step_size"),
        ({"name": "one_cycle", "up_steps": 3, "momentum": (0.9, 0.8)}, "momentum: must be the lower value, then"),
        ({"name": "one_cycle", "up_steps": 3, "warmup_steps": 2}, "warmup_steps: is not for one_cycle"),
        ({"name": "cosine", "warmup_curve": "log"}, "warmup_curve: is not for cosine"),
        ({"name": "warmup", "staircase": False}, "staircase: is not for warmup"),
    ],
)
def test_fields_of_another_schedule_are_refused(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ScheduleOptions.model_validate(fields)


def test_what_is_written_reads_back() -> None:
    written = ScheduleOptions(name="range_test", step_size=2, rate=0.0).model_dump(mode="json")
    assert ScheduleOptions.model_validate(written).rate == 0.0
