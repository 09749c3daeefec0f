"""From the name of an algorithm to its schedule."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

from sambasim.collectives.binomial import binomial_tree
from sambasim.collectives.direct import direct
from sambasim.collectives.doubling import recursive_doubling
from sambasim.collectives.halving import halving_doubling
from sambasim.collectives.ring import ring
from sambasim.collectives.schedule import Algorithm, Rounds, Schedule, nodes_of
from sambasim.collectives.slices import Slice
from sambasim.collectives.two_levels import hierarchical
from sambasim.collectives.verify import verify
from sambasim.errors import UserError

Nodes: TypeAlias = tuple[tuple[int, ...], ...]

_ROUNDS: dict[Algorithm, Callable[[Nodes, Slice, int], Rounds]] = {
    Algorithm.DIRECT: lambda nodes, span, granule: direct(_by_rank(nodes), span, granule),
    Algorithm.HIERARCHICAL: hierarchical,
    Algorithm.HALVING_DOUBLING: lambda nodes, span, granule: halving_doubling(_by_rank(nodes), span, granule),
    Algorithm.RECURSIVE_DOUBLING: lambda nodes, span, granule: recursive_doubling(_by_rank(nodes), span, granule),
    Algorithm.BINOMIAL_TREE: lambda nodes, span, granule: binomial_tree(_by_rank(nodes), span, granule),
    # The ring goes through one node after the other, so that it enters and leaves each only once.
    Algorithm.RING: lambda nodes, span, granule: ring(tuple(chain.from_iterable(nodes)), span, granule),
}


def plan(algorithm: Algorithm, numel: int, node_of: Sequence[int], *, granule: int = 1) -> Schedule:
    """The schedule of an all-reduce of `numel` elements by `algorithm`, verified.

    Rank r is on node `node_of[r]`; any numbers will do for nodes. Slices are cut at multiples of `granule` elements.
    What would move no element is left out: buffers with fewer elements than ranks take fewer messages. Raises UserError
    if there is no rank, or numel is negative, or granule not positive.
    """
    if not node_of:
        raise UserError("an all-reduce needs at least one rank", remedy="give the node of every rank")
    if numel < 0:
        raise UserError(f"a buffer of {numel} elements", remedy="give 0 or more")
    if granule < 1:
        raise UserError(f"slices cut at multiples of {granule} elements", remedy="give 1 or more")
    rounds = _ROUNDS[algorithm](nodes_of(node_of), (0, numel), granule)
    schedule = Schedule(algorithm, numel, tuple(node_of), _without_nothing(rounds))
    verify(schedule)
    return schedule


def _by_rank(nodes: Nodes) -> tuple[int, ...]:
    return tuple(range(sum(len(ranks) for ranks in nodes)))


def _without_nothing(rounds: Rounds) -> Rounds:
    kept = (
        replace(round_, transfers=tuple(transfer for transfer in round_.transfers if transfer.numel))
        for round_ in rounds
    )
    return tuple(round_ for round_ in kept if round_.transfers)
