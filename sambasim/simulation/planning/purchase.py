"""How long training on so many samples takes, and what it costs: the arithmetic of `plan --tokens --days --price`."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from sambasim.simulation.planning.strategy import Priced

DAY_S, HOUR_S = 86_400.0, 3_600.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Training on `samples`, each of `tokens`, None if they are not counted; in `days` at most, None for any time, with
    a `price` of an RDU-hour, None if none is given."""

    samples: int
    tokens: int | None = None
    days: float | None = None
    price: float | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """All steps of a strategy. The last one may be of fewer samples, and counts as whole."""

    priced: Priced
    wanted: Wanted

    @property
    def steps(self) -> int:
        return ceil(self.wanted.samples / self.priced.strategy.global_batch)

    @property
    def predicted_s(self) -> float:
        return self.steps * self.priced.step_s

    @property
    def days(self) -> float:
        return self.predicted_s / DAY_S

    @property
    def rdu_hours(self) -> float:
        return self.priced.rdus * self.predicted_s / HOUR_S

    @property
    def cost(self) -> float | None:
        return None if self.wanted.price is None else self.rdu_hours * self.wanted.price

    @property
    def is_in_time(self) -> bool:
        return self.wanted.days is None or self.days <= self.wanted.days


def fewest(trainings: Sequence[Training]) -> Training | None:
    """That with the fewest RDUs of those in time."""
    return min((each for each in trainings if each.is_in_time), key=lambda each: each.priced.rdus, default=None)
