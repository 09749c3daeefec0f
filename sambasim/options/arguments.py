"""The `[arguments]` table: what a run gives parameters of `forward` and of the loss, by their names."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from pydantic import Field, model_validator

from sambasim.errors import LARGEST_FACTOR
from sambasim.options.base import Options
from sambasim.options.problem import Count, Problem, Refused

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
