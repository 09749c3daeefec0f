"""Predictions against what others have measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from sambasim.published.rows import Row


@dataclass(frozen=True, slots=True)
class Held:
    """A published row and the prediction for it, in the row's figure. `sections` are those of FWD and BCKWD."""

    row: Row
    predicted: float
    sections: int

    @property
    def error(self) -> float:
        """By what part of the published value the prediction is more, or less."""
        return self.predicted / self.row.value - 1


def mean_error(held: Sequence[Held]) -> float:
    """Of all rows, without signs."""
    return mean(abs(one.error) for one in held)
