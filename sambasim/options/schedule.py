"""How the learning rate and the scale of the loss change in a run."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from sambasim.bounded import LARGEST_COUNT
from sambasim.options.base import Count, Options, Problem, show

Share: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


ScheduleName: TypeAlias = Literal[
    "constant", "linear", "cosine", "step", "warmup", "warmup_decay", "warmup_cosine", "one_cycle", "range_test"
]


class ScheduleOptions(Options):
    """The `[training.schedule]` table: the factor of the learning rate at optimizer step `s`, counted from 0.

        warm-up     (s + 1) / warmup_steps                              while s < warmup_steps; then
                    with start_factor: start_factor + (1 - start_factor) · s / warmup_steps
        constant    1
        linear      1 + (final_factor - 1) · t
        cosine      final_factor + (1 - final_factor) · (1 + cos(π t)) / 2
        step        gamma ** ((s - warmup_steps) // step_size)

    where t = (s - warmup_steps) / (total_steps - warmup_steps), at most 1, and 1 if no steps remain after the warm-up.
    The default of total_steps is the number of steps of the run.

    The schedules of DeepSpeed count updates `u`, which skipped steps are not. With v = max(u - 1, 0), as DeepSpeed
    begins its count at the second update, W = warmup_steps, at least 2, T = total_steps and c = up_steps + down_steps:

        warmup          start_factor + (1 - start_factor) · w           w = v / W, or log(v + 1) / log W, at most 1
        warmup_decay    the same; from v = W on with w = (T - v) / (T - W), at least 0
        warmup_cosine   the same; from v = W on cosine, with t = (v - W + 1) / (T - W)
        one_cycle       from start_factor to 1 in up_steps, and back in down_steps; then
                        start_factor / (1 + rate · (u - c) / step_size)
        range_test      1 + rate · u / step_size                        rounded down to stairs if staircase

    `momentum` of one_cycle is what beta1 falls to, and what it rises to again, while the learning rate rises and falls.
    """

    name: ScheduleName = "constant"
    warmup_steps: int = Field(default=0, ge=0, le=LARGEST_COUNT)
    total_steps: Count | None = None
    final_factor: float = Field(default=0.0, ge=0, le=1)
    step_size: Count | None = None
    gamma: float = Field(default=0.1, gt=0)
    warmup_curve: Literal["log", "linear"] | None = None
    start_factor: float | None = Field(default=None, ge=0)
    up_steps: Count | None = None
    down_steps: Count | None = None
    rate: float | None = Field(default=None, ge=0)
    staircase: bool | None = None
    momentum: Annotated[tuple[Share, Share], Field(strict=False)] | None = None

    @property
    def counts_updates(self) -> bool:
        """Whether skipped steps do not advance it."""
        return self.name in _COUNTING_UPDATES

    def problems(self) -> Iterator[Problem]:
        for field in _NEEDED.get(self.name, ()):
            if getattr(self, field) is None:
                yield Problem(field, "is missing", f"--set training.schedule.{field}=…")
        for field, names in _SCHEDULES_WITH.items():
            value = getattr(self, field)
            if self.name not in names and value is not None:
                yield Problem(field, f"is not for {self.name}", f"--set training.schedule.name={names[0]}", show(value))
        if self.name in _WITHOUT_WARMUP and self.warmup_steps:
            what = f"is not for {self.name}, which has no warm-up"
            yield Problem("warmup_steps", what, "--set training.schedule.warmup_steps=0", str(self.warmup_steps))
        if self.rate and self.name == "one_cycle" and self.step_size is None:
            what = "needs step_size, the steps in which the learning rate falls by it after the cycle"
            yield Problem("rate", what, "--set training.schedule.step_size=…", str(self.rate))
        if self.momentum is not None and self.momentum[0] > self.momentum[1]:
            yield Problem("momentum", "must be the lower value, then the higher one", None, show(self.momentum))
        if self.total_steps is not None and self.warmup_steps >= self.total_steps:
            what = f"must be below total_steps, {self.total_steps}"
            yield Problem("warmup_steps", what, given=str(self.warmup_steps))


_WITH_CURVE = ("warmup", "warmup_decay", "warmup_cosine")
_WITHOUT_WARMUP = ("one_cycle", "range_test")
_COUNTING_UPDATES = (*_WITH_CURVE, *_WITHOUT_WARMUP)
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "step": ("step_size",),
    "one_cycle": ("up_steps",),
    "range_test": ("step_size", "rate"),
}
_SCHEDULES_WITH: Mapping[str, tuple[str, ...]] = {
    "step_size": ("step", "one_cycle", "range_test"),
    "warmup_curve": _WITH_CURVE,
    "start_factor": ("constant", "linear", "cosine", "step", *_WITH_CURVE, "one_cycle"),
    "up_steps": ("one_cycle",),
    "down_steps": ("one_cycle",),
    "rate": ("range_test", "one_cycle"),
    "staircase": ("range_test",),
    "momentum": ("one_cycle",),
}


class LossScaleOptions(Options):
    """The `[training.loss_scale]` table, for fp16: the loss is multiplied by `start`. A step whose gradients overflow
    is skipped. If `dynamic`, each overflow from number `hysteresis` on halves the scale; `window` steps without one
    double it, and overflows count from 1 again; if `consecutive`, after any step without one. Below `minimum` the run
    ends with an error. The defaults are those of DeepSpeed."""

    dynamic: bool = True
    start: float = Field(default=2.0**16, ge=1, le=2.0**32)
    window: Count = 1000
    hysteresis: Count = 2
    consecutive: bool = False
    minimum: float = Field(default=1.0, gt=0)

    def problems(self) -> Iterator[Problem]:
        if self.start < self.minimum:
            yield Problem("start", f"must be at least the minimum, {self.minimum:g}", given=f"{self.start:g}")
        for name in ("start", "minimum"):
            value = getattr(self, name)
            if math.frexp(value)[0] != 0.5:
                remedy = f"--set training.loss_scale.{name}={2.0 ** round(math.log2(value))}"
                yield Problem(name, "must be a power of two, so that scaling is exact", remedy, str(value))
