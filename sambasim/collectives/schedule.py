"""A schedule: how ranks come to hold the sum of their buffers, as data.

One schedule has several readers: `price` says what it costs, `draw` shows it, `verify` checks it, and the tests carry
it out on integers. Because all read the same rounds, none can drift from the others.

    rank       one process, with one buffer of `numel` elements
    span       elements `start` to `stop` of that buffer
    transfer   one message: a span of one rank's buffer goes to the same span of another's
    round      transfers of one moment: every span is sent as it was before the round

What one round adds into one span of a rank, with what the rank holds there, is summed by the tree of `tree`, in the
order of the ranks it came from: a rank that hears one peer adds one number, and the owner of a slice in the direct
schedule adds all of them in the design's order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from sambasim.collectives.slices import Slice, cut


class Algorithm(StrEnum):
    """The ways to an all-reduce. Where several are priced equal, the one named first here is chosen."""

    DIRECT = "direct"
    HIERARCHICAL = "hierarchical"
    HALVING_DOUBLING = "halving-doubling"
    RECURSIVE_DOUBLING = "recursive-doubling"
    BINOMIAL_TREE = "binomial-tree"
    RING = "ring"


class Phase(StrEnum):
    """What a round is for."""

    FOLD = "fold"  # surplus ranks hand their buffers in
    REDUCE_SCATTER = "reduce-scatter"  # ends with every slice summed at one owner
    ALL_GATHER = "all-gather"  # ends with every rank holding every summed slice
    EXCHANGE = "exchange"  # both of a pair add the other's whole buffer
    REDUCE = "reduce"  # ends with the whole sum at one rank
    BROADCAST = "broadcast"  # ends with that sum at every rank
    UNFOLD = "unfold"  # surplus ranks get the result


class Scope(StrEnum):
    """Between whom a round's messages go."""

    WORLD = "world"
    NODE = "within nodes"
    NODES = "between nodes"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Elements `start` to `stop` go from rank `source` to rank `target`, which adds them or stores them."""

    source: int
    target: int
    start: int
    stop: int
    accumulate: bool

    @property
    def numel(self) -> int:
        """The elements of the message."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Round:
    """The transfers of one moment."""

    phase: Phase
    transfers: tuple[Transfer, ...]
    scope: Scope = Scope.WORLD


Rounds: TypeAlias = tuple[Round, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rounds of one all-reduce of `numel` elements, in order; rank r is on node `node_of[r]`."""

    algorithm: Algorithm
    numel: int
    node_of: tuple[int, ...]
    rounds: Rounds

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.node_of)


def nodes_of(node_of: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each node, ascending; nodes in the order of their lowest ranks."""
    ranks: dict[int, list[int]] = {}
    for rank, node in enumerate(node_of):
        ranks.setdefault(node, []).append(rank)
    return tuple(tuple(members) for members in ranks.values())


def cut_span(span: Slice, parts: int, granule: int) -> tuple[Slice, ...]:
    """`span` in `parts` slices by the rule of `slices.cut`; some may be empty."""
    start, stop = span
    return tuple((start + first, start + last) for first, last in cut(stop - start, parts, granule))


def sent_numel(schedule: Schedule) -> tuple[int, ...]:
    """How many elements each rank sends, in all rounds together."""
    sent = [0] * schedule.world_size
    for round_ in schedule.rounds:
        for transfer in round_.transfers:
            sent[transfer.source] += transfer.numel
    return tuple(sent)
