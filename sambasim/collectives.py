r"""Communication schedules as data, which `runtime` executes and `simulation` prices: the order in which the operands
of replicas are added, and who sends which slice to whom in a reduce-scatter and an all-gather.

The one order of additions is a balanced binary tree over ranks, in rank order:

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

    phase            what a rank sends
    reduce-scatter   to each owner on another node: the sum of its node's operands for that slice, if it is the port of
                     that owner; where the node's ranks are no subtree, its own operand
    all-gather       its own slice, once to each other node, where the port of the slice receives it

Inside a node, ranks read one another's memory. Every rank sends and receives at most (N - 1) / N of what an all-reduce
among N nodes must move. Prices are those of the alpha-beta-gamma model (Hockney, Parallel Computing 20(3), 1994;
Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005): a rank's messages follow one another, in both directions at once.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

Addition: TypeAlias = tuple[int, int]  # (into, from): the operand of rank `into` becomes its sum with that of `from`


def additions(world_size: int) -> tuple[Addition, ...]:
    """The additions that leave the sum of all operands in that of rank 0, in an executable order."""
    steps: list[Addition] = []
    stride = 1
    while stride < world_size:
        steps += ((rank, rank + stride) for rank in range(0, world_size - stride, 2 * stride))
        stride *= 2
    return tuple(steps)


class Blocks(NamedTuple):
    """How the operands of all nodes are summed. `nodes`: the ranks of each node, ascending; `summed`: whether they are
    added inside the node, and the sum stands in for the operand of the lowest."""

    nodes: tuple[tuple[int, ...], ...]
    summed: tuple[bool, ...]


def is_subtree(ranks: Sequence[int], world_size: int) -> bool:
    """Whether `ranks`, ascending, are all that the world has of an aligned block of a power of two of ranks."""
    first, count = ranks[0], len(ranks)
    block = 1 << (count - 1).bit_length()
    is_block = first % block == 0 and (count == block or first + count == world_size)
    return is_block and list(ranks) == list(range(first, first + count))


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
    others = [ranks for node, ranks in enumerate(layout.nodes) if layout.summed[node] and node != own]
    done = {addition for ranks in others for addition in inside(ranks)}
    return tuple(addition for addition in additions(len(node_of)) if addition not in done)


class Message(NamedTuple):
    """Rank `source` sends to `target` the slice of `owner`: the sum of what `ranks` have, or the owner's parameters."""

    source: int
    target: int
    owner: int
    ranks: tuple[int, ...]


class Messages(NamedTuple):
    """What one rank sends and receives in a phase, in order; `reads`: how many slices of ranks of its node it reads."""

    sent: tuple[Message, ...]
    received: tuple[Message, ...]
    reads: int


def port_of(layout: Blocks, owner: int, node: int) -> int:
    """The rank of `node` that sends and receives the slices of `owner`, a rank of another node, for its node."""
    ranks = layout.nodes[node]
    return ranks[owner % len(ranks)]


def reduce_scatter_messages(node_of: Sequence[int], rank: int) -> Messages:
    """Those of `rank`, where rank r is on node `node_of[r]`."""
    layout, own = blocks(node_of), node_of[rank]
    ranks = layout.nodes[own]
    sent, received, reads = [], [], len(ranks) - 1
    for owner in (owner for owner, node in enumerate(node_of) if node != own):
        if not layout.summed[own]:
            sent.append(Message(rank, owner, owner, (rank,)))
        elif port_of(layout, owner, own) == rank:
            sent.append(Message(rank, owner, owner, ranks))
            reads += len(ranks) - 1
    for node, others in enumerate(layout.nodes):
        if node != own and layout.summed[node]:
            received.append(Message(port_of(layout, rank, node), rank, rank, others))
        elif node != own:
            received += [Message(other, rank, rank, (other,)) for other in others]
    return Messages(tuple(sent), tuple(received), reads)


def all_gather_messages(node_of: Sequence[int], rank: int) -> Messages:
    """Those of `rank`, where rank r is on node `node_of[r]`. All ranks of the node read what comes from other nodes."""
    layout, own = blocks(node_of), node_of[rank]
    nodes = [node for node in range(len(layout.nodes)) if node != own]
    sent = tuple(Message(rank, port_of(layout, rank, node), rank, (rank,)) for node in nodes)
    arriving = [owner for owner, node in enumerate(node_of) if node != own and port_of(layout, owner, own) == rank]
    received = tuple(Message(owner, rank, owner, (owner,)) for owner in arriving)
    return Messages(sent, received, len(node_of) - 1 - len(received))


class Link(NamedTuple):
    """A full-duplex link between two ranks."""

    latency_s: float  # alpha
    transfer_s_per_byte: float  # beta; the inverse of the bandwidth


class Links(NamedTuple):
    """What a price depends on besides messages: the link of two ranks on a node, and that of a node to the network."""

    within: Link
    between: Link
    addition_s_per_byte: float  # gamma, of one arrived byte to what a rank holds


def predicted_s(messages: Messages, slice_bytes: float, ranks_on_node: int, links: Links, *, adds: bool) -> float:
    """Predicted seconds that a rank spends on `messages` in one phase. The `ranks_on_node` ranks of its node share the
    link to other nodes. `adds` says whether what is read and received is added."""
    crossing = max(len(messages.sent), len(messages.received))
    within_bytes = messages.reads * slice_bytes
    between_bytes = crossing * slice_bytes * ranks_on_node
    added_bytes = (messages.reads + len(messages.received)) * slice_bytes if adds else 0.0
    latency_s = (ranks_on_node - 1) * links.within.latency_s + crossing * links.between.latency_s
    transfer_s = within_bytes * links.within.transfer_s_per_byte + between_bytes * links.between.transfer_s_per_byte
    return latency_s + transfer_s + added_bytes * links.addition_s_per_byte
