"""Which sums a node forms before anything leaves it.

The tree of `tree` nests: an aligned block of 2^k ranks, or what there is of it at the end of the world, is a subtree.
Where a node holds exactly such a block, its ranks' operands are added inside the node, and one sum travels instead of
one operand for each rank. Where it does not (ranks dealt round the nodes, or a block that starts in the middle), the
operands travel one by one, and the bits are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sambasim.collectives.tree import Addition, additions


@dataclass(frozen=True, slots=True)
class Blocks:
    """How the ranks of all nodes come together in one sum.

    nodes: the ranks of each node, ascending
    summed: for each node, whether its ranks are added inside it; the sum stands in for its lowest rank's operand
    """

    nodes: tuple[tuple[int, ...], ...]
    summed: tuple[bool, ...]

    def travelling(self, node: int) -> tuple[int, ...]:
        """The ranks whose operands, or sums, leave `node`."""
        return self.nodes[node][:1] if self.summed[node] else self.nodes[node]


def is_subtree(ranks: Sequence[int], world_size: int) -> bool:
    """Whether `ranks`, ascending, are all that the world has of an aligned block of a power of two of ranks."""
    first, count = ranks[0], len(ranks)
    if list(ranks) != list(range(first, first + count)):
        return False
    block = 1
    while block < count:
        block *= 2
    return first % block == 0 and (count == block or first + count == world_size)


def blocks(node_of: Sequence[int]) -> Blocks:
    """The nodes of a world in which rank r is on node `node_of[r]`."""
    nodes = tuple(
        tuple(rank for rank, node in enumerate(node_of) if node == index) for index in range(max(node_of) + 1)
    )
    return Blocks(nodes, tuple(is_subtree(ranks, len(node_of)) for ranks in nodes))


def inside(ranks: Sequence[int]) -> tuple[Addition, ...]:
    """The additions that leave the sum of `ranks`, a subtree, in the operand of the lowest."""
    return tuple((ranks[into], ranks[source]) for into, source in additions(len(ranks)))


def around(node_of: Sequence[int], own: int) -> tuple[Addition, ...]:
    """The additions that are left to an owner on node `own`: those inside its node, and of what came from others."""
    layout = blocks(node_of)
    done = {
        addition
        for node, ranks in enumerate(layout.nodes)
        if layout.summed[node] and node != own
        for addition in inside(ranks)
    }
    return tuple(addition for addition in additions(len(node_of)) if addition not in done)
