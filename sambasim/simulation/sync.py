"""The predicted time of what ranks send each other, in bf16: gradient sync, group by group, between RDUs or through
hosts; what ZeRO 2 and 3 move in a pass; messages in a replica. Nobody has published it: it follows from bandwidths."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from math import ceil, log2
from typing import NamedTuple

from sambasim.collectives import Link, Links, Messages, all_gather_messages, predicted_s, reduce_scatter_messages
from sambasim.costs.work import device_bytes_of
from sambasim.hardware.budget import Budget
from sambasim.hardware.placement import Placement
from sambasim.ir.dataflow import axis_of, groups_of, pass_and_update
from sambasim.ir.graph import Section
from sambasim.ir.mesh import PIPELINE, Mesh
from sambasim.ir.pieces import piece_bytes, pieces_of
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.ranks import copied, ends_of, in_slices
from sambasim.simulation.alone import RankAlone, slowed

WIRE_BYTES = 2  # of one element that is sent

_TOUCHED = 2  # accesses of off-chip memory for each byte that arrives and is added: a read and a write


class SyncPath(StrEnum):
    RDU = "rdu"
    HOST = "host"


class Wire(StrEnum):
    """A link of a cluster, as its fields name it: between RDUs, between an RDU and its host, between nodes."""

    PEER = "peer_link"
    HOST = "host_link"
    NETWORK = "network_link"


@dataclass(frozen=True, slots=True)
class Traffic:
    """A rank's seconds in messages, and the bytes that it receives, by link; over the host link, both ways."""

    predicted_s: float = 0.0
    received_bytes: Mapping[Wire, float] = field(default_factory=dict)

    def __add__(self, other: "Traffic") -> "Traffic":
        wires = {**self.received_bytes, **other.received_bytes}
        received = {wire: self.received_bytes.get(wire, 0) + other.received_bytes.get(wire, 0) for wire in wires}
        return Traffic(self.predicted_s + other.predicted_s, received)

    def __mul__(self, times: float) -> "Traffic":
        received = {wire: times * size_bytes for wire, size_bytes in self.received_bytes.items()}
        return Traffic(times * self.predicted_s, received)


@dataclass(frozen=True, slots=True)
class GroupSync:
    """How one replica reduces the gradients of a group, and gathers parameters if replicas update slices."""

    reduce: Traffic
    gather: Traffic
    ways: str


def syncs_of(alone: RankAlone, placement: Placement, path: SyncPath, zero: int) -> Mapping[str, GroupSync]:
    """By group, how it is synced. Each transfer is launched; on the host path twice: to the host and back."""
    rate = slowed(alone.budget, alone.tiers.rest)
    launch = Traffic(alone.budget.launch_s * (2 if path is SyncPath.HOST else 1))

    def launched(traffic: Traffic) -> Traffic:
        return traffic + launch if traffic.predicted_s else traffic

    syncs = {}
    for group in alone.program.groups:
        sync = group_sync(path, WIRE_BYTES * group.numel, placement, rate, sliced=zero > 0)
        syncs[group.name] = replace(sync, reduce=launched(sync.reduce), gather=launched(sync.gather))
    return syncs


@dataclass(frozen=True, slots=True)
class Piece:
    """What is sent at once: a `share` of group `number` of a program."""

    group: ParameterGroup
    number: int
    share: float
    sync: GroupSync


def pieces_of_syncs(alone: RankAlone, placement: Placement) -> tuple[Mapping[str, Piece], float]:
    """By name, what RDUs exchange, and the seconds that a message is on its way while others arrive: between nodes,
    pieces that are in flight together, else groups."""
    between, no_bytes = placement.nodes > 1, group_sync(SyncPath.RDU, 0, placement, alone.budget, sliced=True)
    latency_s = min(no_bytes.reduce.predicted_s, no_bytes.gather.predicted_s) if between else 0.0
    syncs, found = syncs_of(alone, placement, SyncPath.RDU, 1), dict[str, Piece]()
    for number, group in enumerate(alone.program.groups):
        sync = syncs[group.name]
        for piece in pieces_of(group, piece_bytes(alone.program)) if between else [group]:
            share = piece.numel / group.numel
            reduce, gather = ((each + Traffic(-latency_s)) * share for each in (sync.reduce, sync.gather))
            found[piece.name] = Piece(piece, number, share, replace(sync, reduce=reduce, gather=gather))
    return found, latency_s


def group_sync(path: SyncPath, size_bytes: int, placement: Placement, budget: Budget, *, sliced: bool) -> GroupSync:
    """How several replicas sync a group of `size_bytes`. `sliced`: each updates a slice, as between RDUs always."""
    if path is SyncPath.HOST:
        return _by_host(size_bytes, placement, sliced=sliced)
    cluster = placement.cluster
    peer_bytes_per_s = cluster.peer_link.bandwidth_bytes_per_s * cluster.peer_links_per_rdu / placement.on_an_rdu
    within = Link(cluster.peer_link.latency_s, 1 / peer_bytes_per_s)
    links = Links(within, _between(placement), _TOUCHED / budget.memory_bytes_per_s)
    used = {"reads between devices": placement.on_a_node > 1, "messages between nodes": placement.nodes > 1}
    ways = ", ".join(way for way, is_used in used.items() if is_used)
    return GroupSync(*_exchange(size_bytes, placement.nodes, placement.on_a_node, links), ways)


def _exchange(size_bytes: float, nodes: int, ranks_per_node: int, links: Links) -> tuple[Traffic, Traffic]:
    """A reduce-scatter and an all-gather: what a rank reads in its node, and receives from other nodes."""
    slice_bytes = size_bytes / (nodes * ranks_per_node)

    def phase(messages: Messages, *, adds: bool) -> Traffic:
        seconds = predicted_s(messages, slice_bytes, ranks_per_node, links, adds=adds)
        received = {Wire.PEER: messages.reads * slice_bytes, Wire.NETWORK: len(messages.received) * slice_bytes}
        return Traffic(seconds, received)

    reduce, gather = _messages(nodes, ranks_per_node)
    return phase(reduce, adds=True), phase(gather, adds=False)


@cache
def _messages(nodes: int, ranks_per_node: int) -> tuple[Messages, Messages]:
    node_of = tuple(node for node in range(nodes) for _ in range(ranks_per_node))
    return reduce_scatter_messages(node_of, 0), all_gather_messages(node_of, 0)


def _by_host(size_bytes: int, placement: Placement, *, sliced: bool) -> GroupSync:
    """Gradients go to the host, means of slices come back; then slices go, and those of others come."""
    cluster, here = placement.cluster, placement.on_a_node
    host_bytes_per_s = cluster.host_link.bandwidth_bytes_per_s * cluster.host_links_per_rdu / placement.on_an_rdu
    memory_s_per_byte = 1 / cluster.host_memory_bytes_per_s
    gamma = (_TOUCHED + 1) * memory_s_per_byte
    network = Links(_between(placement), _between(placement), gamma)
    meet_s = ceil(log2(here)) * cluster.host_link.latency_s
    add_s = (here + 1) * size_bytes * memory_s_per_byte if here > 1 else 0.0

    def copied(copied_bytes: float, between: Traffic) -> Traffic:
        """To the host and back, and between hosts."""
        copies_s = copied_bytes * max(1 / host_bytes_per_s, here * memory_s_per_byte)
        received = {Wire.HOST: copied_bytes, Wire.NETWORK: between.received_bytes[Wire.NETWORK] / here}
        return Traffic(2 * cluster.host_link.latency_s + copies_s + meet_s + between.predicted_s, received)

    ways = "messages between nodes" if placement.nodes > 1 else "host memory"
    reduce_network, gather_network = _exchange(size_bytes, placement.nodes, 1, network)
    reduce = copied(size_bytes + size_bytes / placement.replicas, reduce_network) + Traffic(add_s)
    gather = copied(size_bytes, gather_network)
    return GroupSync(reduce, gather, ways) if sliced else GroupSync(reduce + gather, Traffic(), ways)


def _between(placement: Placement) -> Link:
    link = placement.cluster.network_link
    return Link(link.latency_s, 1 / (link.bandwidth_bytes_per_s * placement.cluster.network_links_per_node))


def traffic_of(
    sections: Sequence[Section], alone: RankAlone, placement: Placement, mesh: Mesh, rank: int
) -> Mapping[str, Traffic]:
    """By mesh axis, in one run of `sections` of `rank`, which is like `alone`."""
    program, node_of, found = alone.program, placement.node_of, dict[str, Traffic]()
    graph = program.leading
    for node in (node for section in sections for node in graph.section_nodes(section)):
        axis = axis_of(node)
        receives_nothing = node.operator in ("comm.send", "comm.shard", "comm.index")
        if axis is None or groups_of(node) or receives_nothing:
            continue
        group, is_received = mesh.group(rank, axis), node.operator == "comm.recv"
        value = (node.results[0] or "") if is_received else node.reads[0]
        type_ = graph.values[value] if value in graph.values else program.symbols[value].type
        size_bytes = (1 if is_received else len(group) - 1) * device_bytes_of(type_)
        if value not in alone.work.resident:
            size_bytes = size_bytes * alone.batch_size // program.batch_size
        shift = dict(node.kwargs).get("shift")
        sender = group[(group.index(rank) + (shift if isinstance(shift, int) else 0)) % len(group)]
        peers = [sender] if is_received else group
        traffic = message(size_bytes, placement, within=all(node_of[peer] == node_of[rank] for peer in peers))
        found[axis] = found.get(axis, Traffic()) + traffic
    return found


def copies_of(program: Program, placement: Placement, mesh: Mesh, rank: int) -> Mapping[str, Traffic]:
    """By tied parameter that `rank` updates: along pp the gradient comes, the parameter goes back."""
    own, node_of = {group.name for group in program.groups}, placement.node_of
    found = {}
    for node in program.leading.nodes:
        if (symbol := copied(node)) is not None and own.issuperset(groups_of(node)):
            ends = {node_of[mesh.group(rank, PIPELINE)[position]] for position in ends_of(node)}
            size_bytes = device_bytes_of(program.symbols[symbol].type)
            found[symbol] = message(size_bytes, placement, within=len(ends) == 1)
    return found


def message(size_bytes: int, placement: Placement, *, within: bool) -> Traffic:
    cluster = placement.cluster
    if within:
        wire, link, links = Wire.PEER, cluster.peer_link, cluster.peer_links_per_rdu / placement.on_an_rdu
    else:
        wire, link, links = Wire.NETWORK, cluster.network_link, float(cluster.network_links_per_node)
    return Traffic(link.latency_s + size_bytes / (link.bandwidth_bytes_per_s * links), {wire: size_bytes})


GATHERS_IN_PASSES = 3  # the level of ZeRO at which parameters are gathered in passes, and not after the update


class Moves(NamedTuple):
    """Groups that are gathered before a section of a pass, and those that are reduced behind it in the last pass."""

    gathered: tuple[str, ...]
    reduced: tuple[str, ...]


def zero_of(program: Program) -> int:
    """The level of ZeRO, by default that of `compile --data-parallel`."""
    return program.zero if program.data_parallel else 1


def moves_in_passes(program: Program) -> list[Moves]:
    """By section of a pass."""
    training = in_slices(program).step

    def moved(section: Section, operator: str) -> tuple[str, ...]:
        nodes = (node for node in training.section_nodes(section) if node.operator == operator)
        return tuple(name for node in nodes for name in groups_of(node))

    sections, _ = pass_and_update(training)
    return [Moves(moved(section, "comm.all_gather"), moved(section, "comm.reduce_scatter")) for section in sections]


def gathered_in_passes(alone: RankAlone, placement: Placement) -> list[Traffic]:
    """By section of a pass, what replicas gather over their hosts before it; none below ZeRO 3."""
    if zero_of(alone.program) < GATHERS_IN_PASSES:
        return []
    syncs = syncs_of(alone, placement, SyncPath.HOST, GATHERS_IN_PASSES)
    moves = moves_in_passes(alone.program)
    return [sum((syncs[name].gather for name in before.gathered), Traffic()) for before in moves]
