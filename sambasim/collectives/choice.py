"""Which schedule is predicted fastest, and why.

Every algorithm that fits the layout is priced from its rounds, and the cheapest is chosen. Prices within a billionth
of each other are equal: then the order of `Algorithm` decides, which begins with the one that the runtime carries out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sambasim.collectives.links import Links
from sambasim.collectives.plan import plan
from sambasim.collectives.price import Price, price
from sambasim.collectives.schedule import Algorithm, nodes_of
from sambasim.units import format_bytes, format_seconds

_EQUAL_WITHIN = 1e-9  # far above what the order of floating-point sums changes, far below what a model can tell


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm and what it is predicted to take."""

    algorithm: Algorithm
    price: Price


@dataclass(frozen=True, slots=True)
class Choice:
    """The algorithm to use, the reason in one sentence, and all others, cheapest first."""

    algorithm: Algorithm
    price: Price
    reason: str
    alternatives: tuple[Candidate, ...]

    @property
    def predicted_s(self) -> float:
        """The predicted time of the chosen algorithm."""
        return self.price.predicted_s


def candidates(node_of: Sequence[int]) -> tuple[Algorithm, ...]:
    """The algorithms worth a price: hierarchical only where a node has company and a rank has company in it."""
    nodes = nodes_of(node_of)
    two_levels = 1 < len(nodes) < len(node_of)
    return tuple(algorithm for algorithm in Algorithm if two_levels or algorithm is not Algorithm.HIERARCHICAL)


def choose(size_bytes: int, node_of: Sequence[int], links: Links) -> Choice:
    """The algorithm predicted fastest for an all-reduce of `size_bytes` where rank r is on node `node_of[r]`.

    Slices are cut to the byte. Raises UserError as `plan` does.
    """
    priced = [
        Candidate(algorithm, price(plan(algorithm, size_bytes, node_of), 1, links)) for algorithm in candidates(node_of)
    ]
    least_s = min(each.price.predicted_s for each in priced)
    best = next(each for each in priced if each.price.predicted_s <= least_s * (1 + _EQUAL_WITHIN))
    others = sorted((each for each in priced if each is not best), key=lambda each: each.price.predicted_s)
    reason = _reason(best, others[0], size_bytes, len(node_of))
    return Choice(best.algorithm, best.price, reason, tuple(others))


def _reason(best: Candidate, other: Candidate, size_bytes: int, world_size: int) -> str:
    """Why `best`, in one sentence, against the cheapest of the others."""
    if world_size == 1:
        return f"{best.algorithm}: one rank has nothing to exchange."
    if size_bytes == 0:
        return f"{best.algorithm}: there are no bytes to exchange."
    start = f"{best.algorithm} for {format_bytes(size_bytes)} among {world_size} ranks:"
    if other.price.predicted_s <= best.price.predicted_s * (1 + _EQUAL_WITHIN):
        return f"{start} predicted equal to {other.algorithm}, and first in the order of preference."
    ours, theirs = best.price, other.price
    savings_s = {
        "latency": theirs.latency_s - ours.latency_s,
        "bytes on the wire": theirs.transfer_s - ours.transfer_s,
        "additions": theirs.addition_s - ours.addition_s,
    }
    what = max(savings_s, key=lambda part: savings_s[part])
    return (
        f"{start} predicted {format_seconds(ours.predicted_s)}, against {format_seconds(theirs.predicted_s)} by"
        f" {other.algorithm}, which spends {format_seconds(savings_s[what])} more on {what}."
    )
