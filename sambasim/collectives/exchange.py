"""The two halves of an all-reduce among equal nodes, in closed form: what they take does not depend on how many ranks
have to be looked at, so that a thousand are priced as quickly as two.

Gradients are reduced so that every rank owns a slice, and later every rank gets all slices. Inside a node on all bytes,
between nodes on the slice of a node's rank: as `two_levels` does it, but each level by the algorithm that is cheapest
there, of those that have these two halves. See `formulas` for what they cost, and for sources.
"""

from dataclasses import dataclass, replace

from sambasim.collectives.formulas import formula
from sambasim.collectives.links import Link, Links
from sambasim.collectives.price import Price
from sambasim.collectives.schedule import Algorithm

HALVED = (Algorithm.DIRECT, Algorithm.HALVING_DOUBLING, Algorithm.RING)
"""The algorithms that reduce slices first and gather them then. Where prices are equal, the first is taken."""

_NOTHING = Price(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Exchange:
    """What the halves are predicted to take; `within` and `between` are None where there is nobody to talk to."""

    reduce_scatter: Price
    all_gather: Price
    within: Algorithm | None
    between: Algorithm | None


def cheapest_exchange(size_bytes: float, nodes: int, ranks_per_node: int, links: Links) -> Exchange:
    """For buffers of `size_bytes` on `nodes` nodes with `ranks_per_node` ranks each."""
    between = links.between
    if links.shared_port:
        between = replace(between, transfer_s_per_byte=between.transfer_s_per_byte * ranks_per_node)
    gamma = links.addition_s_per_byte
    inner, within = _cheapest(ranks_per_node, size_bytes, links.within, gamma)
    outer, across = _cheapest(nodes, size_bytes / ranks_per_node, between, gamma)
    return Exchange(
        reduce_scatter=Price(
            (inner.latency_s + outer.latency_s) / 2,
            (inner.transfer_s + outer.transfer_s) / 2,
            inner.addition_s + outer.addition_s,
        ),
        all_gather=Price((inner.latency_s + outer.latency_s) / 2, (inner.transfer_s + outer.transfer_s) / 2, 0.0),
        within=within,
        between=across,
    )


def _cheapest(ranks: int, size_bytes: float, link: Link, addition_s_per_byte: float) -> tuple[Price, Algorithm | None]:
    if ranks == 1:
        return _NOTHING, None
    priced = [(formula(algorithm, ranks, size_bytes, link, addition_s_per_byte), algorithm) for algorithm in HALVED]
    return min(priced, key=lambda pair: pair[0].predicted_s)
