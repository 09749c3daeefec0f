"""What changes in a run, step by step: the learning rate, the loss scale of fp16, and the `[arguments]` table, what a
run gives parameters of `forward` and of the loss, by their names."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from sambasim.errors import LARGEST_FACTOR
from sambasim.options.base import Options
from sambasim.options.fields import ScheduleFields
from sambasim.options.problem import Count, Factor, PositiveFactor, Problem, Refused, broken

Share: TypeAlias = Annotated[float, Field(ge=0, lt=1)]


class ScheduleOptions(ScheduleFields, Options):
    """The `[training.schedule]` table: the factor of the learning rate at each step. The formulas are in
    `configs/README.md`, too."""

    total_steps: Count | None = None
    final_factor: float = Field(default=0.0, ge=0, le=1)
    step_size: Count | None = None
    gamma: PositiveFactor = 0.1
    warmup_curve: Literal["log", "linear"] | None = None
    start_factor: Factor | None = None
    up_steps: Count | None = None
    down_steps: Count | None = None
    rate: Factor | None = None
    staircase: bool | None = None
    momentum: Annotated[tuple[Share, Share], Field(strict=False)] | None = None

    @property
    def counts_updates(self) -> bool:
        """Whether skipped steps do not advance it."""
        return self.name in _BY_UPDATES

    def factor(self, step: int, run_steps: int) -> float:
        """Of the learning rate at optimizer step `step`, counted from 0, of a run of `run_steps` steps. Skipped steps
        count, but for DeepSpeed's schedules (`counts_updates`), for which `step` is the number of updates."""
        if self.counts_updates:
            return self._factor_of_update(step, self.total_steps or run_steps)
        if step < self.warmup_steps:
            start, steps = self.start_factor, self.warmup_steps
            return (step + 1) / steps if start is None else (start * (steps - step) + step) / steps
        past = step - self.warmup_steps
        left = (self.total_steps or run_steps) - self.warmup_steps
        progress = min(past / left, 1.0) if left > 0 else 1.0
        if self.name == "linear":
            return 1 + (self.final_factor - 1) * progress
        if self.name == "cosine":
            return self.final_factor + (1 - self.final_factor) * (1 + math.cos(math.pi * progress)) / 2
        if self.name == "step" and self.step_size:
            return float(self.gamma ** (past // self.step_size))
        return 1.0

    def _factor_of_update(self, update: int, total: int) -> float:
        start, rate, size = self.start_factor or 0.0, self.rate or 0.0, self.step_size or 1
        if self.name == "range_test":
            intervals = update / size
            return 1 + rate * (math.floor(intervals) if self.staircase else intervals)
        if self.name == "one_cycle":
            past = update - sum(self._cycle)
            return start / (1 + rate * past / size) if past > 0 else start + (1 - start) * self._height(update)
        past, warmup = max(update - 1, 0), max(self.warmup_steps, 2)
        left = max(total - warmup, 1)
        if past < warmup:
            curve = past / warmup if self.warmup_curve == "linear" else math.log(past + 1) / math.log(warmup)
            return start + (1 - start) * curve
        if self.name == "warmup":
            return 1.0
        if self.name == "warmup_decay":
            return start + (1 - start) * max((total - past) / left, 0.0)
        final, progress = self.final_factor, min((past - warmup + 1) / left, 1.0)
        return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2

    def beta1(self, update: int) -> float | None:
        """What it makes beta1 after `update` updates; None if it does not change it."""
        if self.momentum is None:
            return None
        low, high = self.momentum
        return high - (high - low) * self._height(update)

    @property
    def _cycle(self) -> tuple[int, int]:
        """The updates in which one cycle goes up, and down."""
        up = self.up_steps or 1
        return up, self.down_steps or up

    def _height(self, update: int) -> float:
        """Where one cycle is: from 0 to 1, back to 0, and there from then on."""
        up, down = self._cycle
        return update / up if update <= up else max((up + down - update) / down, 0.0)

    def problems(self) -> Iterator[Problem]:
        for field in _NEEDED.get(self.name, ()):
            if getattr(self, field) is None:
                yield Problem(field, "is missing", f"--set training.schedule.{field}=…")
        for field, names in _SCHEDULES_WITH.items():
            value = getattr(self, field)
            if self.name not in names and value is not None:
                yield Problem(field, f"is not for {self.name}", f"--lr-schedule {names[0]}", value)
        yield from broken(
            (self.name in _WITHOUT_WARMUP and self.warmup_steps, "warmup_steps",
             f"is not for {self.name}, which has no warm-up", "--warmup-steps 0", self.warmup_steps),
            (self.rate and self.name == "one_cycle" and self.step_size is None, "rate",
             "needs step_size, the steps in which the learning rate falls by it after the cycle",
             "--set training.schedule.step_size=…", self.rate),
            (self.momentum is not None and self.momentum[0] > self.momentum[1], "momentum",
             "must be the lower value, then the higher one", None, self.momentum),
            (self.total_steps is not None and self.warmup_steps >= self.total_steps, "warmup_steps",
             f"must be below total_steps, {self.total_steps}", None, self.warmup_steps),
        )  # fmt: skip


_WITH_CURVE = ("warmup", "warmup_decay", "warmup_cosine")
WITH_END = ("linear", "cosine", "warmup_decay", "warmup_cosine")
"""The schedules that end with the run, unless total_steps says when."""
_WITHOUT_WARMUP = ("one_cycle", "range_test")
_BY_UPDATES = (*_WITH_CURVE, *_WITHOUT_WARMUP)
_NEEDED = {"step": ("step_size",), "one_cycle": ("up_steps",), "range_test": ("step_size", "rate")}
_SCHEDULES_WITH: Mapping[str, tuple[str, ...]] = {
    "step_size": ("step", "one_cycle", "range_test"),
    "warmup_curve": _WITH_CURVE,
    "start_factor": ("constant", "linear", "cosine", "step", *_WITH_CURVE, "one_cycle"),
    "rate": ("range_test", "one_cycle"),
    "staircase": ("range_test",),
    **dict.fromkeys(("up_steps", "down_steps", "momentum"), ("one_cycle",)),
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
    minimum: float = Field(default=1.0, gt=0, le=2.0**32)

    def problems(self) -> Iterator[Problem]:
        if self.start < self.minimum:
            yield Problem("start", f"must be at least the minimum, {self.minimum:g}", given=self.start)
        for name in ("start", "minimum"):
            value = getattr(self, name)
            if math.frexp(value)[0] != 0.5:
                remedy = f"--set training.loss_scale.{name}={2.0 ** round(math.log2(value))}"
                yield Problem(name, "must be a power of two, so that scaling is exact", remedy, value)


COUNTERS = ("step", "epoch", "progress")
"""What parameters without a default receive where they have these names."""


class ArgumentOptions(Options, serialize_by_alias=True):
    """A counter, or a number that goes to `to` in `steps` optimizer steps, by default in the whole training."""

    schedule: Literal["constant", "linear", "cosine", "step", "epoch", "progress"]
    start: float = Field(default=0.0, ge=-LARGEST_FACTOR, le=LARGEST_FACTOR, alias="from")
    to: float = Field(default=0.0, ge=-LARGEST_FACTOR, le=LARGEST_FACTOR)
    steps: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _in_short(cls, given: object) -> object:
        if isinstance(given, Mapping):
            if unknown := given.keys() - {"schedule", "from", "to", "steps"}:
                raise Refused(Problem(min(unknown), "is not an option; they are schedule, from, to and steps"))
            return given
        return {"schedule": given} if isinstance(given, str) else {"schedule": "constant", "to": given}

    def problems(self) -> Iterator[Problem]:
        is_moving = self.schedule in ("linear", "cosine")
        for name, value in {"from": self.start, "to": self.to, "steps": self.steps}.items():
            if value and not is_moving and (name, self.schedule) != ("to", "constant"):
                yield Problem(name, f"is not for {self.schedule}", given=value)

    @property
    def dtype(self) -> str:
        return "int64" if self.schedule in ("step", "epoch") else "float32"

    def at(self, step: int | None, epoch: int, progress: float) -> float:
        """Its value after `step` optimizer steps, without skipped ones, in `epoch`, from 0; `progress` is the part of
        the whole training. Without a `step` the training is over."""
        if self.schedule in COUNTERS:
            return {"step": step or 0, "epoch": epoch, "progress": progress}[self.schedule]
        part = 1.0 if step is None else progress if self.steps is None else min(step / self.steps, 1.0)
        way = {"constant": 1.0, "linear": part, "cosine": (1 - math.cos(math.pi * part)) / 2}
        return self.start + (self.to - self.start) * way[self.schedule]


def arguments_of(names: Iterable[str], table: Mapping[str, ArgumentOptions]) -> dict[str, ArgumentOptions]:
    """What a run gives as `names`: as `table` says, and else the counters of these names."""
    return {name: table.get(name) or ArgumentOptions.model_validate(name) for name in names}
