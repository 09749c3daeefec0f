"""The `checkpoint` part of a run's options: where it saves where it is, how often, and what it goes on from."""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pydantic import Field, model_validator

from sambasim.options.base import FilePath, Options
from sambasim.options.problems import Problem, Refused, show


class Unit(StrEnum):
    """What a cadence counts."""

    STEPS = "steps"
    EPOCHS = "epochs"
    SECONDS = "s"


@dataclass(frozen=True, slots=True)
class Cadence:
    """A checkpoint after each `count` of a unit."""

    count: int
    unit: Unit


DEFAULT_EVERY = "10min"
DEFAULT_KEEP = 3

_PATTERN = re.compile(r"([0-9]{1,9}) ?(|steps?|epochs?|s|min|h)")
_UNITS = {
    "": (1, Unit.STEPS), "step": (1, Unit.STEPS), "steps": (1, Unit.STEPS), "epoch": (1, Unit.EPOCHS),
    "epochs": (1, Unit.EPOCHS), "s": (1, Unit.SECONDS), "min": (60, Unit.SECONDS), "h": (3600, Unit.SECONDS),
}  # fmt: skip


class CheckpointOptions(Options):
    """`every` is a number of steps, or one with a unit: `50`, `1epoch`, `30s`, `10min`. `keep` of the newest stay.

    `resume` is "newest", which must be whole; "auto", the newest that is whole; "if-any", the same, or none where there
    is none; or a path. With `exact`, a run is refused that would not have the bits of one that was never interrupted.
    `on_failure` is of a checkpoint that cannot be written: "warn" goes on without it.
    """

    dir: FilePath | None = None
    every: str | None = None
    keep: int | None = Field(default=None, ge=1)
    resume: str | None = Field(default=None, min_length=1)
    exact: bool = False
    on_failure: Literal["warn", "stop"] | None = None

    @property
    def cadence(self) -> Cadence:
        """How often a checkpoint is written."""
        cadence = parse_cadence(self.every or DEFAULT_EVERY)
        if cadence is None:
            raise Refused(Problem("every", "is no number of steps, epochs or seconds", given=show(self.every)))
        return cadence

    @property
    def kept(self) -> int:
        """How many of the newest stay."""
        return self.keep or DEFAULT_KEEP

    @model_validator(mode="after")
    def _fields_fit_together(self) -> "CheckpointOptions":
        problems: list[Problem] = []
        if self.every is not None and parse_cadence(self.every) is None:
            what = "must be a number of steps, or one of epochs, s, min or h, and at least 1"
            problems.append(Problem("every", what, "--checkpoint-every 100, 1epoch, 30s or 10min", show(self.every)))
        if self.dir is None:
            for field, flag in (
                ("every", "--checkpoint-every"),
                ("keep", "--keep"),
                ("on_failure", "--on-checkpoint-failure"),
            ):
                if getattr(self, field) is not None:
                    what = "is about checkpoints, and none are written"
                    problems.append(Problem(field, what, f"add --checkpoint-dir DIR, or leave out {flag}"))
            if self.resume in ("newest", "auto", "if-any"):
                what = "does not know where the checkpoints are"
                problems.append(Problem("resume", what, "add --checkpoint-dir DIR, or name one: --resume DIR/step-…"))
        if self.exact and self.resume is None:
            problems.append(Problem("exact", "is about a run that is resumed", "add --resume, or leave out --exact"))
        if problems:
            raise Refused(*problems)
        return self


def parse_cadence(text: str) -> Cadence | None:
    """`50`, `50steps`, `1epoch`, `30s`, `10min`, `2h`; None for anything else."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None or int(match[1]) == 0:
        return None
    factor, unit = _UNITS[match[2]]
    return Cadence(int(match[1]) * factor, unit)
