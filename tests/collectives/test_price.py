"""Prices from the rounds, against the closed formulas and against what no schedule can beat."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.collectives.folding import power_of_two_within
from sambasim.collectives.formulas import FLAT, coefficients, formula, hierarchical_formula
from sambasim.collectives.links import Link, Links
from sambasim.collectives.plan import plan
from sambasim.collectives.price import Price, price
from sambasim.collectives.schedule import Algorithm, sent_numel
from sambasim.errors import UserError

times_s = st.floats(1e-12, 1e-3)
links = st.builds(Link, times_s, times_s)
any_links = st.builds(Links, links, links, times_s, st.booleans())
world_sizes = st.integers(1, 17)
ELEMENT_BYTES = 4


def _close(one: Price, other: Price) -> bool:
    return (one.latency_s, one.transfer_s, one.addition_s) == pytest.approx(
        (other.latency_s, other.transfer_s, other.addition_s), rel=1e-12, abs=0
    )


@pytest.mark.parametrize("algorithm", FLAT)
@given(world_size=world_sizes, share=st.integers(1, 40), links=any_links, alone=st.booleans())
def test_rounds_cost_what_the_formula_says_where_slices_are_equal(
    algorithm: Algorithm, world_size: int, share: int, links: Links, alone: bool
) -> None:
    """On one node, and with every rank on a node of its own."""
    numel = share * world_size * power_of_two_within(world_size)
    node_of = range(world_size) if alone else (0,) * world_size
    link = links.between if alone else links.within
    from_rounds = price(plan(algorithm, numel, node_of), ELEMENT_BYTES, links)
    assert _close(from_rounds, formula(algorithm, world_size, numel * ELEMENT_BYTES, link, links.addition_s_per_byte))


@given(nodes=st.integers(1, 5), ranks=st.integers(1, 5), share=st.integers(1, 20), links=any_links, dealt=st.booleans())
def test_hierarchical_rounds_cost_what_the_formula_says_where_nodes_are_equal(
    nodes: int, ranks: int, share: int, links: Links, dealt: bool
) -> None:
    numel = share * nodes * ranks
    node_of = [rank % nodes if dealt else rank // ranks for rank in range(nodes * ranks)]
    from_rounds = price(plan(Algorithm.HIERARCHICAL, numel, node_of), ELEMENT_BYTES, links)
    assert _close(from_rounds, hierarchical_formula(nodes, ranks, numel * ELEMENT_BYTES, links))


@pytest.mark.parametrize(
    ("algorithm", "world_size", "messages", "buffers_sent", "buffers_added"),
    [
        (Algorithm.DIRECT, 4, 6, 1.5, 0.75),
        (Algorithm.RING, 5, 8, 1.6, 0.8),
        (Algorithm.HALVING_DOUBLING, 8, 6, 1.75, 0.875),
        (Algorithm.HALVING_DOUBLING, 6, 6, 3.5, 1.75),
        (Algorithm.RECURSIVE_DOUBLING, 8, 3, 3, 3),
        (Algorithm.RECURSIVE_DOUBLING, 6, 4, 4, 3),
        (Algorithm.BINOMIAL_TREE, 8, 6, 6, 3),
        (Algorithm.BINOMIAL_TREE, 5, 6, 6, 3),
    ],
)
def test_the_rows_of_the_table(
    algorithm: Algorithm, world_size: int, messages: int, buffers_sent: float, buffers_added: float
) -> None:
    row = coefficients(algorithm, world_size)
    assert (row.messages, row.buffers_sent, row.buffers_added) == pytest.approx((messages, buffers_sent, buffers_added))


@pytest.mark.parametrize("algorithm", [Algorithm.DIRECT, Algorithm.RING])
@given(world_size=world_sizes, share=st.integers(1, 40))
def test_every_rank_sends_what_the_formula_says(algorithm: Algorithm, world_size: int, share: int) -> None:
    numel = share * world_size
    sent = sent_numel(plan(algorithm, numel, (0,) * world_size))
    assert sent == (round(coefficients(algorithm, world_size).buffers_sent * numel),) * world_size


@pytest.mark.parametrize("algorithm", [Algorithm.HALVING_DOUBLING, Algorithm.RECURSIVE_DOUBLING])
@given(exponent=st.integers(0, 4), share=st.integers(1, 40))
def test_every_rank_of_a_power_of_two_sends_what_the_formula_says(
    algorithm: Algorithm, exponent: int, share: int
) -> None:
    world_size = 2**exponent
    numel = share * world_size
    sent = sent_numel(plan(algorithm, numel, (0,) * world_size))
    assert sent == (round(coefficients(algorithm, world_size).buffers_sent * numel),) * world_size


@pytest.mark.parametrize("algorithm", list(Algorithm))
@given(node_of=st.lists(st.integers(0, 4), min_size=1, max_size=17), numel=st.integers(0, 100), link=links)
def test_nothing_is_cheaper_than_the_lower_bound(
    algorithm: Algorithm, node_of: list[int], numel: int, link: Link
) -> None:
    """Source of the bound: nccl-tests, PERFORMANCE: 2 (p - 1) / p of the buffer through every rank's port."""
    predicted = price(plan(algorithm, numel, node_of), ELEMENT_BYTES, Links(link, link, 0.0, shared_port=False))
    bound_bytes = 2 * (len(node_of) - 1) / len(node_of) * numel * ELEMENT_BYTES
    assert predicted.transfer_s >= bound_bytes * link.transfer_s_per_byte * (1 - 1e-12)


@pytest.mark.parametrize("algorithm", FLAT)
@given(world_size=world_sizes, numel=st.integers(0, 100), more=st.integers(0, 20), links=any_links)
def test_time_never_falls_on_one_node_when_bytes_grow(
    algorithm: Algorithm, world_size: int, numel: int, more: int, links: Links
) -> None:
    fewer_s, more_s = (
        price(plan(algorithm, count, (0,) * world_size), ELEMENT_BYTES, links).predicted_s
        for count in (numel, numel + more)
    )
    assert more_s >= fewer_s * (1 - 1e-12)


@pytest.mark.parametrize("algorithm", list(Algorithm))
@given(
    nodes=st.integers(1, 4),
    ranks=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    numel=st.integers(0, 100),
    links=any_links,
)
def test_time_never_falls_in_any_layout_when_every_slice_grows(
    algorithm: Algorithm, nodes: int, ranks: list[int], numel: int, links: Links
) -> None:
    """In mixed layouts an element more may move a cut to a cheaper place; not so where each slice gets as much more."""
    node_of = [rank % nodes for rank in ranks]
    more = prod({len(node_of), power_of_two_within(len(node_of))})
    if algorithm is Algorithm.HIERARCHICAL:
        sizes = [node_of.count(node) for node in set(node_of)]
        more = len(sizes) * max(sizes)
    fewer_s, more_s = (
        price(plan(algorithm, count, node_of), ELEMENT_BYTES, links).predicted_s for count in (numel, numel + more)
    )
    assert more_s >= fewer_s * (1 - 1e-12)


def test_the_busier_direction_of_a_port_decides() -> None:
    """One element among three ranks: its owner hears two peers in one round, and tells two in the next."""
    links = Links(Link(1.0, 0.0), Link(1.0, 0.0), 0.0)
    assert price(plan(Algorithm.DIRECT, 1, (0, 0, 0)), 1, links).predicted_s == 4.0


def test_ranks_of_a_node_wait_for_a_port_that_they_share() -> None:
    link = Link(latency_s=0.0, transfer_s_per_byte=1.0)
    free = Link(latency_s=0.0, transfer_s_per_byte=0.0)
    schedule = plan(Algorithm.HIERARCHICAL, 8, (0, 0, 1, 1))
    own, shared = (price(schedule, 1, Links(free, link, 0.0, shared_port=each)).predicted_s for each in (False, True))
    # Each rank sends 2 bytes of its slice of 4 in each of two rounds; a node's port sends 4 for its two ranks.
    assert (own, shared) == (4.0, 8.0)


def test_a_rank_that_stays_on_its_node_does_not_wait_for_the_network() -> None:
    """Of the first round of a tree on (0, 0) and (1,): ranks 0 and 1 talk on their node, and nobody else."""
    schedule = plan(Algorithm.BINOMIAL_TREE, 10, (0, 0, 1))
    links = Links(Link(1.0, 0.0), Link(100.0, 0.0), 0.0)
    assert price(schedule, 1, links) == Price(2 * 1.0 + 2 * 100.0, 0.0, 0.0)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_times_that_cannot_be_are_refused(wrong: float) -> None:
    fine = Link(0.0, 0.0)
    with pytest.raises(UserError, match="latency_s is"):
        Link(wrong, 0.0)
    with pytest.raises(UserError, match="transfer_s_per_byte is"):
        Link(0.0, wrong)
    with pytest.raises(UserError, match="addition_s_per_byte is"):
        Links(fine, fine, wrong)


def test_what_has_no_formula_is_refused() -> None:
    with pytest.raises(UserError, match="there is no formula for hierarchical among 4 ranks"):
        coefficients(Algorithm.HIERARCHICAL, 4)
    with pytest.raises(UserError, match="there is no formula for ring among 0 ranks"):
        coefficients(Algorithm.RING, 0)


def test_elements_without_bytes_are_refused() -> None:
    fine = Link(0.0, 0.0)
    with pytest.raises(UserError, match="elements of 0 bytes"):
        price(plan(Algorithm.RING, 4, (0, 0)), 0, Links(fine, fine, 0.0))
