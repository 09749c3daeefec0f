"""DP09: replicas that take different numbers of steps, seen where they meet to compare."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from sambasim.runtime.ranks import Communicator
from sambasim.samba.checks.findings import Finding

Shown = TypeVar("Shown")

AS_MANY_BATCHES = "as many batches on every rank: DistributedSampler(dataset, …), and DataLoader(…, drop_last=True)"
"""What to do about DP09."""


@dataclass(frozen=True, slots=True)
class Point:
    """How far a replica has come: to its `step`, or, where it has `ended`, through that step and to the app's end."""

    step: int
    ended: bool = False

    @property
    def words(self) -> str:
        """What the replica does there."""
        steps = "1 step" if self.step == 1 else f"{self.step} steps"
        return f"came to its end after {steps}" if self.ended else f"takes step {self.step}"


def meet(communicator: Communicator, own: Point, shown: Shown) -> tuple[Sequence[Point], Sequence[Shown]]:
    """Collective. Where every rank is, and what it shows. What they show can be compared only if they are `together`:
    a rank that is elsewhere shows something else."""
    met = communicator.all_gather_object((own, shown))
    return [point for point, _ in met], [one for _, one in met]


def together(points: Sequence[Point]) -> bool:
    """Whether all have ended, or all are about to take the same step."""
    return all(point.ended for point in points) or len(set(points)) == 1


def different_steps(points: Sequence[Point], where: str | None) -> Finding | None:
    """DP09, of replicas that are not together."""
    if together(points):
        return None
    rank, other = next((rank, point) for rank, point in enumerate(points) if not together([points[0], point]))
    return Finding(
        "DP09",
        f"replica 0 {points[0].words}, and replica {rank} {other.words}",
        where,
        AS_MANY_BATCHES,
    )
