"""Predictions against what others have measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from sambasim.published.rows import Row


@dataclass(frozen=True, slots=True)
class Held:
    """A published row and the prediction for it, in the row's figure; `host_s` where that was published too.
    `sections` are those of FWD and BCKWD."""

    row: Row
    predicted: float
    host_s: float | None
    sections: int

    @property
    def error(self) -> float:
        """By what part of the published value the prediction is more, or less."""
        return self.predicted / self.row.value - 1

    @property
    def host_error(self) -> float | None:
        """The same of the host time."""
        return None if self.host_s is None or self.row.host_s is None else self.host_s / self.row.host_s - 1


def mean_error(held: Sequence[Held]) -> float:
    """Of all rows, without signs; host times apart."""
    return mean(abs(one.error) for one in held)


def mean_host_error(held: Sequence[Held]) -> float | None:
    """Of the host times of the rows that have one, without signs."""
    errors = [abs(one.host_error) for one in held if one.host_error is not None]
    return mean(errors) if errors else None
