"""When a run writes its checkpoints: after so many steps or epochs, or so much time."""

import time
from dataclasses import dataclass

from sambasim.options.grammar import Cadence, Unit


@dataclass(slots=True)
class Clock:
    """Says when a checkpoint is due by `cadence`. Time counts from the last one."""

    cadence: Cadence
    _since_s: float = 0.0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A checkpoint has been written, or could not be."""
        self._since_s = time.monotonic()

    def is_time(self) -> bool:
        """Whether one is due by time. Each rank has a clock of its own, so one rank must speak for all."""
        if self.cadence.unit is not Unit.SECONDS:
            return False
        return time.monotonic() - self._since_s >= self.cadence.count

    def after_step(self, step: int) -> bool:
        """Whether one is due after `step`, by steps."""
        return self.cadence.unit is Unit.STEPS and step % self.cadence.count == 0

    def after_epoch(self, epochs: int) -> bool:
        """Whether one is due once `epochs` epochs have ended."""
        return self.cadence.unit is Unit.EPOCHS and epochs % self.cadence.count == 0
