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
from math import ceil, log2

from sambasim.collectives.exchange import Exchange, cheapest_exchange
from sambasim.collectives.links import Link, Links
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
    exchange = cheapest_exchange(size_bytes, placement.nodes, placement.on_a_node, links)
    return GroupSync(exchange.reduce_scatter.predicted_s, exchange.all_gather.predicted_s, _ways(exchange))


def _by_host(size_bytes: int, placement: Placement) -> GroupSync:
    cluster, here = placement.cluster, placement.on_a_node
    host_bytes_per_s = cluster.host_link.bandwidth_bytes_per_s * cluster.host_links_per_rdu / placement.on_an_rdu
    memory_s_per_byte = 1 / cluster.host_memory_bytes_per_s
    copy_s = cluster.host_link.latency_s + size_bytes * max(1 / host_bytes_per_s, here * memory_s_per_byte)
    meet_s = 2 * ceil(log2(here)) * cluster.host_link.latency_s
    add_s = (here + 1) * size_bytes * memory_s_per_byte if here > 1 else 0.0
    gamma = (_TOUCHED + 1) * memory_s_per_byte
    links = Links(_between(placement), _between(placement), gamma)
    exchange = cheapest_exchange(size_bytes, placement.nodes, 1, links)
    network_s = exchange.reduce_scatter.predicted_s + exchange.all_gather.predicted_s
    return GroupSync(2 * copy_s + meet_s + add_s + network_s, 0.0, _ways(exchange) or "host memory")


def _between(placement: Placement) -> Link:
    link = placement.cluster.network_link
    return Link(link.latency_s, 1 / (link.bandwidth_bytes_per_s * placement.cluster.network_links_per_node))


def _ways(exchange: Exchange) -> str:
    inside = f"{exchange.within} in a node" if exchange.within else ""
    across = f"{exchange.between} between nodes" if exchange.between else ""
    return ", ".join(part for part in (inside, across) if part)
