"""The closed formulas of the literature, against which the tests hold the prices of the rounds.

For n bytes and p ranks, of which q = 2^⌊lg p⌋ go on after folding; f = 2 where p > q, and 0 where all go on:

    algorithm            messages      n bytes sent        n bytes added         source
    direct               2 (p - 1)     2 (p - 1) / p       (p - 1) / p           two rounds, every peer in turn
    ring                 2 (p - 1)     2 (p - 1) / p       (p - 1) / p           Patarasuk & Yuan 2009
    halving-doubling     2 lg q + f    2 (q - 1) / q + f   (q - 1) / q + f / 2   Thakur, Rabenseifner, Gropp 2005
    recursive-doubling   lg q + f      lg q + f            lg q + f / 2          same
    binomial-tree        2 ⌈lg p⌉      2 ⌈lg p⌉            ⌈lg p⌉                same
    hierarchical         the direct schedule twice: see `hierarchical_formula`

They are exact where the slices are equal: n divides by p (by q for halving-doubling; always where nothing is sliced).
For worlds that fold, halving-doubling is often written with p where q stands here; the ranks that go on are q.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sambasim.collectives.folding import power_of_two_within
from sambasim.collectives.links import Link, Links
from sambasim.collectives.price import Price
from sambasim.collectives.schedule import Algorithm
from sambasim.errors import UserError


@dataclass(frozen=True, slots=True)
class Coefficients:
    """How often an algorithm pays alpha; and beta and gamma, in buffers of n bytes."""

    messages: int
    buffers_sent: float
    buffers_added: float


def _direct(world_size: int) -> Coefficients:
    share = (world_size - 1) / world_size
    return Coefficients(2 * (world_size - 1), 2 * share, share)


def _halving_doubling(world_size: int) -> Coefficients:
    core = power_of_two_within(world_size)
    fold = 2 if world_size > core else 0
    share = (core - 1) / core
    return Coefficients(2 * (core.bit_length() - 1) + fold, 2 * share + fold, share + fold / 2)


def _recursive_doubling(world_size: int) -> Coefficients:
    core = power_of_two_within(world_size)
    fold = 2 if world_size > core else 0
    rounds = core.bit_length() - 1
    return Coefficients(rounds + fold, rounds + fold, rounds + fold / 2)


def _binomial_tree(world_size: int) -> Coefficients:
    rounds = (world_size - 1).bit_length()
    return Coefficients(2 * rounds, 2 * rounds, rounds)


_COEFFICIENTS: dict[Algorithm, Callable[[int], Coefficients]] = {
    Algorithm.DIRECT: _direct,
    Algorithm.RING: _direct,
    Algorithm.HALVING_DOUBLING: _halving_doubling,
    Algorithm.RECURSIVE_DOUBLING: _recursive_doubling,
    Algorithm.BINOMIAL_TREE: _binomial_tree,
}

FLAT = tuple(_COEFFICIENTS)
"""The algorithms that treat all ranks alike."""


def coefficients(algorithm: Algorithm, world_size: int) -> Coefficients:
    """The row of the table for one of `FLAT`. Raises UserError for another algorithm or an empty world."""
    if algorithm not in _COEFFICIENTS or world_size < 1:
        raise UserError(
            f"there is no formula for {algorithm} among {world_size} ranks",
            remedy=f"ask for one of {', '.join(FLAT)} among 1 or more",
        )
    return _COEFFICIENTS[algorithm](world_size)


def formula(algorithm: Algorithm, world_size: int, size_bytes: float, link: Link, addition_s_per_byte: float) -> Price:
    """The price of one of `FLAT` where every two ranks are joined by the same `link`. Raises as `coefficients` does."""
    row = coefficients(algorithm, world_size)
    return Price(
        row.messages * link.latency_s,
        row.buffers_sent * size_bytes * link.transfer_s_per_byte,
        row.buffers_added * size_bytes * addition_s_per_byte,
    )


def hierarchical_formula(nodes: int, ranks_per_node: int, size_bytes: int, links: Links) -> Price:
    """The price of the hierarchical algorithm where all nodes have the same number of ranks.

    The direct formula twice: within nodes on n bytes, between nodes on a slice of n / ranks_per_node; where the ranks
    of a node share a port, the bytes of all their slices go through it. Exact if n divides by nodes * ranks_per_node.
    """
    inner, outer = _direct(ranks_per_node), _direct(nodes)
    slice_bytes = size_bytes / ranks_per_node
    port_bytes = size_bytes if links.shared_port else slice_bytes
    return Price(
        inner.messages * links.within.latency_s + outer.messages * links.between.latency_s,
        inner.buffers_sent * size_bytes * links.within.transfer_s_per_byte
        + outer.buffers_sent * port_bytes * links.between.transfer_s_per_byte,
        (inner.buffers_added * size_bytes + outer.buffers_added * slice_bytes) * links.addition_s_per_byte,
    )
