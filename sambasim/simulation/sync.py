"""What gradient sync is predicted to take, group by group, on the links of a cluster.

    rdu     devices exchange slices themselves: by PCIe or better inside a node, by the node's NICs between nodes; each
            then updates its slice, and they gather the new parameters
    host    each replica's gradients go to its host, which adds those of its node; hosts exchange sums; the means go
            back, and every replica updates everything

Gradients and parameters travel in bf16, as the device holds them. Replicas of one RDU share its links, those of one
node its memory and NICs. The measure of all of it is the links' bandwidth: no sync of RDUs has been published.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from math import ceil, log2

from sambasim.collectives.schedule import (
    Link,
    Links,
    Messages,
    all_gather_messages,
    price,
    reduce_scatter_messages,
)
from sambasim.hardware.budget import Budget
from sambasim.hardware.placement import Placement

WIRE_BYTES = 2
"""Of one number that travels."""

_TOUCHED = 2
"""Times that the memory beside the chip is used for a byte that arrives and is added: what is there, and the sum."""


class SyncPath(StrEnum):
    """Who exchanges gradients."""

    RDU = "rdu"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class GroupSync:
    """One gradient group on one path: seconds until its owners have the means, and from updated slices until every
    replica has all parameters, 0 where each replica updates all. `ways` says how."""

    reduce_s: float
    gather_s: float
    ways: str


def group_sync(path: SyncPath, size_bytes: int, placement: Placement, budget: Budget) -> GroupSync:
    """Of a group of `size_bytes` on the wire."""
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
    return GroupSync(reduce_s, gather_s, ", ".join(part for part in (inside, across) if part))


def _exchange_s(size_bytes: float, nodes: int, ranks_per_node: int, links: Links) -> tuple[float, float]:
    """The two halves of an all-reduce among equal nodes: those of rank 0 are as long as those of any other."""
    reduce, gather = _messages(nodes, ranks_per_node)
    slice_bytes = size_bytes / (nodes * ranks_per_node)
    return (
        price(reduce, slice_bytes, ranks_per_node, links, adds=True).predicted_s,
        price(gather, slice_bytes, ranks_per_node, links, adds=False).predicted_s,
    )


@lru_cache(maxsize=64)
def _messages(nodes: int, ranks_per_node: int) -> tuple[Messages, Messages]:
    """Those of rank 0 in the two phases; every group has the same."""
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
    return GroupSync(2 * copy_s + meet_s + add_s + network_s, 0.0, ways)


def _between(placement: Placement) -> Link:
    link = placement.cluster.network_link
    return Link(link.latency_s, 1 / (link.bandwidth_bytes_per_s * placement.cluster.network_links_per_node))
