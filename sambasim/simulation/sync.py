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
class GroupSync:
    """One gradient group on one path: seconds to reduce, and to gather the parameters, 0 if each replica updates all.
    `ways` says how, as text. `received_bytes` is what a replica receives; over the host link, what goes both ways."""

    reduce_s: float
    gather_s: float
    ways: str
    received_bytes: Mapping[Wire, float] = field(default_factory=dict)


def group_sync(path: SyncPath, size_bytes: int, placement: Placement, budget: Budget) -> GroupSync:
    if placement.replicas == 1:
        return GroupSync(0.0, 0.0, "")
    return _by_rdu(size_bytes, placement, budget) if path is SyncPath.RDU else _by_host(size_bytes, placement)


def _by_rdu(size_bytes: int, placement: Placement, budget: Budget) -> GroupSync:
    cluster = placement.cluster
    peer_bytes_per_s = cluster.peer_link.bandwidth_bytes_per_s * cluster.peer_links_per_rdu / placement.on_an_rdu
    within = Link(cluster.peer_link.latency_s, 1 / peer_bytes_per_s)
    links = Links(within, _between(placement), _TOUCHED / budget.memory_bytes_per_s)
    reduce_s, gather_s = _exchange_s(size_bytes, placement.nodes, placement.on_a_node, links)
    inside = "reads between devices" if placement.on_a_node > 1 else ""
    across = "messages between nodes" if placement.nodes > 1 else ""
    read_bytes, arrived_bytes = _received_bytes(size_bytes, placement.nodes, placement.on_a_node)
    received_bytes = {Wire.PEER: read_bytes, Wire.NETWORK: arrived_bytes}
    return GroupSync(reduce_s, gather_s, ", ".join(part for part in (inside, across) if part), received_bytes)


def _exchange_s(size_bytes: float, nodes: int, ranks_per_node: int, links: Links) -> tuple[float, float]:
    reduce, gather = _messages(nodes, ranks_per_node)
    slice_bytes = size_bytes / (nodes * ranks_per_node)
    return (
        predicted_s(reduce, slice_bytes, ranks_per_node, links, adds=True),
        predicted_s(gather, slice_bytes, ranks_per_node, links, adds=False),
    )


def _received_bytes(size_bytes: float, nodes: int, ranks_per_node: int) -> tuple[float, float]:
    """What a rank reads in its node, and receives from other nodes."""
    phases, slice_bytes = _messages(nodes, ranks_per_node), size_bytes / (nodes * ranks_per_node)
    return sum(one.reads for one in phases) * slice_bytes, sum(len(one.received) for one in phases) * slice_bytes


@cache
def _messages(nodes: int, ranks_per_node: int) -> tuple[Messages, Messages]:
    node_of = tuple(node for node in range(nodes) for _ in range(ranks_per_node))
    return reduce_scatter_messages(node_of, 0), all_gather_messages(node_of, 0)


def _by_host(size_bytes: int, placement: Placement) -> GroupSync:
    cluster, here = placement.cluster, placement.on_a_node
    host_bytes_per_s = cluster.host_link.bandwidth_bytes_per_s * cluster.host_links_per_rdu / placement.on_an_rdu
    memory_s_per_byte = 1 / cluster.host_memory_bytes_per_s
    copy_s = cluster.host_link.latency_s + size_bytes * max(1 / host_bytes_per_s, here * memory_s_per_byte)
    meet_s = 2 * ceil(log2(here)) * cluster.host_link.latency_s
    add_s = (here + 1) * size_bytes * memory_s_per_byte if here > 1 else 0.0
    gamma = (_TOUCHED + 1) * memory_s_per_byte
    links = Links(_between(placement), _between(placement), gamma)
    network_s = sum(_exchange_s(size_bytes, placement.nodes, 1, links))
    ways = "messages between nodes" if placement.nodes > 1 else "host memory"
    _, node_bytes = _received_bytes(size_bytes, placement.nodes, 1)
    received_bytes = {Wire.HOST: 2.0 * size_bytes, Wire.NETWORK: node_bytes / here}
    return GroupSync(2 * copy_s + meet_s + add_s + network_s, 0.0, ways, received_bytes)


def _between(placement: Placement) -> Link:
    link = placement.cluster.network_link
    return Link(link.latency_s, 1 / (link.bandwidth_bytes_per_s * placement.cluster.network_links_per_node))
