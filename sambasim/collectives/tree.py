r"""The one order in which replicas are added: a balanced binary tree over ranks, in rank order.

    rank   0   1   2   3   4   5
            \ /     \ /     \ /
             +       +       +
              \     /        |        an absent leaf is skipped: adding a zero would turn -0.0 into +0.0
                 +           |
                  \         /
                       +

Floating-point addition is not associative, so the bits of a sum are those of its order. This order depends on the
number of replicas alone: not on who adds, on the sync path, or on which node a replica is.

It nests: an aligned block of 2^k ranks, or what there is of it at the end of the world, is a subtree. Where a node
holds exactly such a block, its ranks' operands are added inside the node, and one sum is sent instead of one operand
for each rank. Where it does not (round-robin placement, or a block that starts in the middle), the operands are sent
one by one, and the bits are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sambasim.errors import InternalError

Addition: TypeAlias = tuple[int, int]  # (into, from): the operand of rank `into` becomes its sum with that of `from`


def additions(world_size: int) -> tuple[Addition, ...]:
    """The additions that leave the sum of all operands in that of rank 0, in an executable order.

    Raises InternalError if world_size < 1.
    """
    if world_size < 1:
        raise InternalError(f"a sum over {world_size} replicas")
    steps: list[Addition] = []
    stride = 1
    while stride < world_size:
        steps += ((rank, rank + stride) for rank in range(0, world_size - stride, 2 * stride))
        stride *= 2
    return tuple(steps)


@dataclass(frozen=True, slots=True)
class Blocks:
    """How the operands of all nodes are summed.

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
    """The `Blocks` of a job whose rank r is on node `node_of[r]`."""
    members: list[list[int]] = [[] for _ in range(max(node_of) + 1)]
    for rank, node in enumerate(node_of):
        members[node].append(rank)
    nodes = tuple(map(tuple, members))
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
