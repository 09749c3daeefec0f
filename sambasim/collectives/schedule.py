"""The schedule of a reduce-scatter and an all-gather over nodes: who sends which slice to whom, as data.

    phase            what a rank sends
    reduce-scatter   to each owner on another node: the sum of its node's operands for that slice, if it is the port of
                     that owner; where the node's ranks are no subtree, its own operand
    all-gather       its own slice, once to each other node, where the port of the slice receives it

Inside a node, ranks read one another's memory. Every rank sends and receives at most (N - 1) / N of what an all-reduce
among N nodes must move. `runtime` sends these messages, and `simulation` prices the same ones, by the alpha-beta-gamma
model (Hockney, Parallel Computing 20(3), 1994; Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005): a rank's messages
follow one another, in both directions at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sambasim.collectives.tree import Blocks, blocks


@dataclass(frozen=True, slots=True)
class Message:
    """Rank `source` sends the slice of rank `owner` to rank `target`: the sum of the operands of `ranks`, or, of
    parameters, what the owner has made."""

    source: int
    target: int
    owner: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Messages:
    """What one rank sends and receives in a phase, in order. `reads` counts the slices that it reads from other ranks
    of its node."""

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
    for owner, node in enumerate(node_of):
        if node == own:
            continue
        if not layout.summed[own]:
            sent.append(Message(rank, owner, owner, (rank,)))
        elif port_of(layout, owner, own) == rank:
            sent.append(Message(rank, owner, owner, ranks))
            reads += len(ranks) - 1
    for node, others in enumerate(layout.nodes):
        if node == own:
            continue
        if layout.summed[node]:
            received.append(Message(port_of(layout, rank, node), rank, rank, others))
        else:
            received += [Message(other, rank, rank, (other,)) for other in others]
    return Messages(tuple(sent), tuple(received), reads)


def all_gather_messages(node_of: Sequence[int], rank: int) -> Messages:
    """Those of `rank`, where rank r is on node `node_of[r]`. The slices that come from other nodes are read by the
    ranks of the node too."""
    layout, own = blocks(node_of), node_of[rank]
    nodes = [node for node in range(len(layout.nodes)) if node != own]
    sent = tuple(Message(rank, port_of(layout, rank, node), rank, (rank,)) for node in nodes)
    arriving = [owner for owner, node in enumerate(node_of) if node != own and port_of(layout, owner, own) == rank]
    received = tuple(Message(owner, rank, owner, (owner,)) for owner in arriving)
    return Messages(sent, received, len(node_of) - 1 - len(received))


@dataclass(frozen=True, slots=True)
class Link:
    """A full-duplex link between two ranks.

    latency_s: alpha, seconds for a message of no bytes
    transfer_s_per_byte: beta, seconds for each byte; the inverse of the bandwidth
    """

    latency_s: float
    transfer_s_per_byte: float


@dataclass(frozen=True, slots=True)
class Links:
    """What a price depends on besides the messages.

    within, between: links of two ranks on one node, and on two nodes; the ranks of a node share one to the network
    addition_s_per_byte: gamma, seconds to add one arrived byte to what a rank holds
    """

    within: Link
    between: Link
    addition_s_per_byte: float


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
