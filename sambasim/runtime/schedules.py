"""What the learning rate is multiplied by at each step."""

import math

from sambasim.options.training import ScheduleOptions


def factor(schedule: ScheduleOptions, step: int, run_steps: int) -> float:
    """The factor at optimizer step `step`, counted from 0, of a run of `run_steps`; see ScheduleOptions."""
    if step < schedule.warmup_steps:
        return (step + 1) / schedule.warmup_steps
    past = step - schedule.warmup_steps
    left = (schedule.total_steps or run_steps) - schedule.warmup_steps
    progress = min(past / left, 1.0) if left > 0 else 1.0
    if schedule.name == "linear":
        return 1 + (schedule.final_factor - 1) * progress
    if schedule.name == "cosine":
        return schedule.final_factor + (1 - schedule.final_factor) * (1 + math.cos(math.pi * progress)) / 2
    if schedule.name == "step" and schedule.step_size:
        return float(schedule.gamma ** (past // schedule.step_size))
    return 1.0
