"""The predicted time of gradient sync, group by group, on the links of a cluster, between RDUs or through hosts.
Gradients and parameters are sent in bf16. Nobody has published a sync of RDUs: the time follows from bandwidths
alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from math import ceil, log2

from sambasim.collectives.schedule import (
    Link,
    Links,
    Messages,
    all_gather_messages,
    predicted_s,
    reduce_scatter_messages,
)
from sambasim.hardware.budget import Budget
from sambasim.hardware.placement import Placement

WIRE_BYTES = 2
"""Of one element that is sent."""

_TOUCHED = 2
"""Accesses of off-chip memory for each byte that arrives and is added: a read and a write."""


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
    """The seconds of a rank in messages, and the bytes that it receives, by link; over the host link, what goes both
    ways."""

    predicted_s: float = 0.0
    received_bytes: Mapping[Wire, float] = field(default_factory=dict)

    def __add__(self, other: "Traffic") -> "Traffic":
        wires = {**self.received_bytes, **other.received_bytes}
        received = {wire: self.received_bytes.get(wire, 0) + other.received_bytes.get(wire, 0) for wire in wires}
        return Traffic(self.predicted_s + other.predicted_s, received)

    def __mul__(self, times: int) -> "Traffic":
        received = {wire: times * size_bytes for wire, size_bytes in self.received_bytes.items()}
        return Traffic(times * self.predicted_s, received)


@dataclass(frozen=True, slots=True)
class GroupSync:
    """One gradient group on one path, for one replica: `reduce` its gradients, and `gather` its parameters, nothing if
    each replica updates all. `ways` says how, as text."""

    reduce: Traffic
    gather: Traffic
    ways: str


def group_sync(path: SyncPath, size_bytes: int, placement: Placement, budget: Budget, *, sliced: bool) -> GroupSync:
    """The sync of a group of `size_bytes`. `sliced`: each replica updates a slice; between RDUs it always does."""
    if placement.replicas == 1:
        return GroupSync(Traffic(), Traffic(), "")
    if path is SyncPath.RDU:
        return _by_rdu(size_bytes, placement, budget)
    return _by_host(size_bytes, placement, sliced=sliced)


def _by_rdu(size_bytes: int, placement: Placement, budget: Budget) -> GroupSync:
    cluster = placement.cluster
    peer_bytes_per_s = cluster.peer_link.bandwidth_bytes_per_s * cluster.peer_links_per_rdu / placement.on_an_rdu
    within = Link(cluster.peer_link.latency_s, 1 / peer_bytes_per_s)
    links = Links(within, _between(placement), _TOUCHED / budget.memory_bytes_per_s)
    reduce, gather = _exchange(size_bytes, placement.nodes, placement.on_a_node, links)
    inside = "reads between devices" if placement.on_a_node > 1 else ""
    across = "messages between nodes" if placement.nodes > 1 else ""
    return GroupSync(reduce, gather, ", ".join(part for part in (inside, across) if part))


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
    """Gradients go to the host, and the mean of a slice comes back; then slices go there, and those of others come:
    of parameters, or, where each replica updates all, of gradients."""
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
