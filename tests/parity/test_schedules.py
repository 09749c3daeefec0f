"""The learning rate of every step, against the schedulers of torch.optim.

Those multiply one step's rate into the next one's, and ours is worked out anew at each step: the two agree to 1e-12,
and to the bit where torch works its own out anew too (LambdaLR, in test_eager.py).
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR, StepLR

from sambasim.options.training import ScheduleOptions
from sambasim.runtime.plan import learning_rate_factor

RATE, STEPS, WARMUP = 0.3, 40, 8

Make = Callable[[torch.optim.Optimizer, int], LRScheduler]
"""The scheduler of an optimizer, for so many steps after the warm-up."""

SCHEDULES: dict[str, tuple[ScheduleOptions, Make]] = {
    "constant": (ScheduleOptions(), lambda optimizer, steps: ConstantLR(optimizer, factor=1.0)),
    "linear": (
        ScheduleOptions(name="linear"),
        lambda optimizer, steps: LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=steps),
    ),
    "linear to a tenth": (
        ScheduleOptions(name="linear", final_factor=0.1),
        lambda optimizer, steps: LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=steps),
    ),
    "cosine": (ScheduleOptions(name="cosine"), lambda optimizer, steps: CosineAnnealingLR(optimizer, T_max=steps)),
    "cosine to a tenth": (
        ScheduleOptions(name="cosine", final_factor=0.1),
        lambda optimizer, steps: CosineAnnealingLR(optimizer, T_max=steps, eta_min=0.1 * RATE),
    ),
    "step": (
        ScheduleOptions(name="step", step_size=7, gamma=0.5),
        lambda optimizer, steps: StepLR(optimizer, step_size=7, gamma=0.5),
    ),
}


@pytest.mark.parametrize("warmup", [0, WARMUP])
@pytest.mark.parametrize("name", SCHEDULES)
def test_rates_are_those_of_torch(name: str, warmup: int) -> None:
    schedule, make = SCHEDULES[name]
    schedule = schedule.model_copy(update={"warmup_steps": warmup})
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
    ours = [RATE * learning_rate_factor(schedule, step, STEPS) for step in range(STEPS)]
    assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-15)
    assert ours[max(warmup - 1, 0)] == ours[warmup] == RATE
    assert (len(set(ours[warmup:])) == 1) == (name == "constant")


def test_the_length_of_a_schedule_may_be_given_and_its_end_stays() -> None:
    """Torch's cosine rises again after its end; ours stays there."""
    schedule = ScheduleOptions(name="cosine", total_steps=10, final_factor=0.2)
    assert [learning_rate_factor(schedule, step, 1000) for step in (5, 10, 11, 500)] == pytest.approx(
        [0.6, 0.2, 0.2, 0.2]
    )
