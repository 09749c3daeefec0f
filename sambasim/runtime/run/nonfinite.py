"""Losses and gradients that are not finite, and the scale of losses that avoids them in float16.

`--on-nonfinite`: stop at a step whose loss is NaN or infinite, skip it (see `Replica`), or ignore it.

Only the loss is checked in each step. Parameters are checked before a checkpoint is written.
"""

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, with_config

from sambasim.errors import NumericsError
from sambasim.options.run import OnNonfinite
from sambasim.options.schedule import LossScaleOptions
from sambasim.records import Count
from sambasim.runtime.run.plan import Position
from sambasim.runtime.run.run_observer import RunObserver, Step

MOST_NOTES = 5

MOST_IN_A_ROW = 20


class LossWatch:
    """Checks the losses of each step after it was reported; all ranks come to the same result. `newest` returns the
    name of the newest checkpoint; `goes_on`: whether `command` itself resumes from it."""

    def __init__(
        self,
        choice: OnNonfinite,
        observer: RunObserver,
        command: str,
        newest: Callable[[], str | None] = lambda: None,
        *,
        goes_on: bool = False,
    ) -> None:
        self._choice = choice
        self._observer = observer
        self._command = command
        self._newest = newest
        self._goes_on = goes_on
        self._notes = 0
        self._in_a_row = 0

    @property
    def is_skipping(self) -> bool:
        """Whether the last step was skipped. Then only the end of the run is saved: the parameters may be the cause."""
        return self._in_a_row > 0

    def check(self, step: Step, losses: Sequence[float]) -> None:
        """Check the `losses` of all replicas in `step`. Raises NumericsError if the run must stop."""
        if math.isfinite(step.loss) or self._choice == "ignore":
            self._in_a_row = 0
            return
        self._in_a_row += 1
        where = which(losses)
        if self._choice == "stop" or self._in_a_row > MOST_IN_A_ROW:
            skipped = f", as were the {MOST_IN_A_ROW} before it" if self._choice == "skip" else ""
            raise self._error(
                f"the loss of step {step.step} is not finite{skipped}: {where}",
                f"epoch {step.epoch}, step {step.step}",
                "" if skipped else ", or --on-nonfinite skip to go on",
            )
        self._notes += 1
        if self._notes <= MOST_NOTES:
            others = "; further ones are counted" if self._notes == MOST_NOTES else ""
            self._observer.noted(f"step {step.step} is skipped, its loss is not finite: {where}{others}")

    def check_scale(self, scale: float, least: float, step: Step) -> None:
        """Raises NumericsError if overflows have brought the loss scale below `least`."""
        if scale < least:
            raise self._error(
                f"the gradients of step {step.step} are not finite in float16, at the smallest loss scale, {least:g}",
                f"epoch {step.epoch}, step {step.step}",
                ", or a smaller learning rate, or --dtype bf16",
                " --set training.loss_scale.dynamic=false",
            )

    def check_run(self, steps: int, skipped: int) -> None:
        """Check a finished run before its end is saved. Raises NumericsError if all its steps were skipped."""
        if steps and skipped == steps:
            raise self._error(
                f"nothing was trained: in all {steps} steps the loss or the gradients were not finite, and they were "
                "skipped",
                "the end of the run",
            )

    def check_parameters(self, name: str | None, position: Position) -> None:
        """Check before a checkpoint is written. Raises NumericsError if `name`, a non-finite parameter, is not None."""
        if name is None or self._choice == "ignore":
            return
        loss = "" if self.is_skipping else ", whose loss still was"
        raise self._error(
            f"the parameter {name} is not finite after step {position.step}{loss}",
            f"epoch {position.epoch + 1}, step {position.step}",
            ", or --on-nonfinite ignore to go on",
        )

    def _error(self, what: str, where: str, otherwise: str = "", flags: str = "") -> NumericsError:
        """The error, with a command that resumes from the newest checkpoint, if there is one. `flags` are added to the
        command, and the text `otherwise` follows it. A `--resume` that is added overrides an earlier one."""
        newest = self._newest()
        kept = f"; the last checkpoint is {newest}" if newest else ""
        resume = " --resume" if newest and not self._goes_on else ""
        return NumericsError(
            what,
            where=f"{where}; nothing of it was saved{kept}",
            remedy=f"{self._command}{resume}{flags} --debug-numerics to see where it begins{otherwise}",
        )


def which(losses: Sequence[float]) -> str:
    """Which of `losses` are not finite: `nan on replica 1 of 4; inf on replicas 0 and 3 of 4`."""
    replicas: dict[str, list[int]] = {}
    for replica, loss in enumerate(losses):
        if not math.isfinite(loss):
            replicas.setdefault(str(loss), []).append(replica)
    if len(losses) == 1:
        return next(iter(replicas))
    return "; ".join(f"{value} on {_named(numbers)} of {len(losses)}" for value, numbers in replicas.items())


def as_typed(command: Sequence[str], ranks: int) -> str:
    """The command line that starts `command` on `ranks` ranks."""
    return f"mpirun -np {ranks} {shlex.join(command)}" if ranks > 1 else shlex.join(command)


def _named(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"replica {numbers[0]}"
    return f"replicas {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"


_LARGEST = {"float16": 2.0**15}
"""The largest power of two of a dtype, where it is small."""


@with_config(extra="forbid", strict=True)
@dataclass(slots=True)
class LossScale:
    """The scale `value` of the next step, on all ranks the same. `good_steps`: since the last overflow or change;
    `tolerated`: overflows that do not halve the scale yet."""

    value: Annotated[float, Field(gt=0)]
    good_steps: Count
    tolerated: Count

    @classmethod
    def first(cls, options: LossScaleOptions, dtype: str) -> "LossScale":
        """`dtype`: of the loss, which must hold the scale."""
        return cls(min(options.start, _LARGEST.get(dtype, options.start)), 0, options.hysteresis - 1)

    def update(self, options: LossScaleOptions, dtype: str, *, overflowed: bool) -> None:
        """After a step. The value may fall below the minimum: then the run must end."""
        if not options.dynamic:
            return
        if not overflowed:
            self.good_steps += 1
            if options.consecutive:
                self.tolerated = options.hysteresis - 1
            if self.good_steps == options.window:
                self.value = min(2 * self.value, _LARGEST.get(dtype, 2 * self.value))
                self.good_steps, self.tolerated = 0, options.hysteresis - 1
            return
        self.good_steps = 0
        if self.tolerated:
            self.tolerated -= 1
        else:
            self.value /= 2
