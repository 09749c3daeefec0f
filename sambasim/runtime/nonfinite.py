"""What is said of a step whose loss is NaN or infinite, and whether the run goes on: `--on-nonfinite`.

    stop      the step is told to the listeners as any other; then every rank raises the same error
    skip      the step was not applied (see `sync.skipping`): the run goes on, and says so, unless all steps are such
    ignore    the run goes on with what came of it; its summary names the first such step

The loss decides. A gradient may overflow while the loss is still finite: then the loss of a later step tells, or the
next checkpoint, which is not written of parameters that are not finite.
"""

import math
import shlex
from collections.abc import Callable, Sequence

from sambasim.errors import NumericsError
from sambasim.options.flags import OnNonfinite
from sambasim.runtime.listener import Listener, Step
from sambasim.runtime.plan import Position

MOST_NOTES = 5
"""Skipped steps that are told as they happen; all of them are counted."""

MOST_IN_A_ROW = 20
"""Skipped steps with no other between them: after more, it is not the data that is at fault."""

_MOST_REPLICAS = 8
"""Replicas that are named."""


class LossWatch:
    """Looks at the losses of each step, on every rank alike, once listeners have heard of the step.

    command: what was typed, mpirun included, for the remedy
    newest: the name of the newest checkpoint that the run could be resumed from, if there is one
    goes_on: whether `command` goes on from that one as it is
    """

    def __init__(
        self,
        choice: OnNonfinite,
        listener: Listener,
        command: str,
        newest: Callable[[], str | None] = lambda: None,
        *,
        goes_on: bool = False,
    ) -> None:
        self._choice = choice
        self._listener = listener
        self._command = command
        self._newest = newest
        self._goes_on = goes_on
        self._notes = 0
        self._in_a_row = 0

    @property
    def is_skipping(self) -> bool:
        """Whether the last step was skipped. What was before it may be what has ruined it, and is not saved anew, but
        where the run ends."""
        return self._in_a_row > 0

    def look(self, step: Step, losses: Sequence[float]) -> None:
        """`losses` are those of all replicas in `step`. Raises NumericsError for one that is not finite, if the run
        is to stop there."""
        if math.isfinite(step.loss) or self._choice == "ignore":
            self._in_a_row = 0
            return
        self._in_a_row += 1
        told = which(losses)
        if self._choice == "stop" or self._in_a_row > MOST_IN_A_ROW:
            skipped = f", as were the {MOST_IN_A_ROW} before it" if self._choice == "skip" else ""
            raise self._error(
                f"the loss of step {step.step} is not finite{skipped}: {told}",
                f"epoch {step.epoch}, step {step.step}",
                "" if skipped else ", or --on-nonfinite skip to go on",
            )
        self._notes += 1
        if self._notes <= MOST_NOTES:
            more = "; further ones are counted" if self._notes == MOST_NOTES else ""
            self._listener.noted(f"step {step.step} is skipped, its loss is not finite: {told}{more}")

    def look_at_all(self, steps: int, skipped: int) -> None:
        """Of a run that is over, before its end is saved. Raises NumericsError if all its steps were skipped, for then
        nothing has been trained."""
        if steps and skipped == steps:
            raise self._error(
                f"nothing was trained: the losses of all {steps} steps were not finite, and the steps were skipped",
                "the end of the run",
            )

    def look_at_parameters(self, name: str | None, position: Position) -> None:
        """`name` is a parameter that is not finite at `position`, or None. Raises NumericsError for it: a checkpoint
        would keep it, and in time take the place of those that are sound."""
        if name is None or self._choice == "ignore":
            return
        loss = "" if self.is_skipping else ", whose loss still was"
        raise self._error(
            f"the parameter {name} is not finite after step {position.step}{loss}",
            f"epoch {position.epoch + 1}, step {position.step}",
            ", or --on-nonfinite ignore to go on",
        )

    def _error(self, what: str, where: str, otherwise: str = "") -> NumericsError:
        """What to type goes on from the newest checkpoint: that is quick, and a folder that holds some is not begun in
        anew. Of two `--resume`, the second counts."""
        newest = self._newest()
        kept = f"; the last checkpoint is {newest}" if newest else ""
        resume = " --resume" if newest and not self._goes_on else ""
        return NumericsError(
            what,
            where=f"{where}; nothing of it was saved{kept}",
            remedy=f"{self._command}{resume} --debug-numerics to see where it begins{otherwise}",
        )


def which(losses: Sequence[float]) -> str:
    """Which of `losses` are not finite, by what they are: `nan on replica 1 of 4; inf on replicas 0 and 3 of 4`."""
    replicas: dict[str, list[int]] = {}
    for replica, loss in enumerate(losses):
        if not math.isfinite(loss):
            replicas.setdefault(str(loss), []).append(replica)
    if len(losses) == 1:
        return next(iter(replicas))
    return "; ".join(f"{value} on {_named(numbers)} of {len(losses)}" for value, numbers in replicas.items())


def as_typed(command: Sequence[str], ranks: int) -> str:
    """The command line that starts `command` on so many ranks."""
    return f"mpirun -np {ranks} {shlex.join(command)}" if ranks > 1 else shlex.join(command)


def _named(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"replica {numbers[0]}"
    if len(numbers) > _MOST_REPLICAS:
        return f"replicas {', '.join(map(str, numbers[:_MOST_REPLICAS]))} and {len(numbers) - _MOST_REPLICAS} more"
    return f"replicas {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
