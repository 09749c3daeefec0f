"""The halves of an all-reduce in closed form, held against schedules and against laws."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.collectives.exchange import HALVED, cheapest_exchange
from sambasim.collectives.links import Link, Links
from sambasim.collectives.plan import plan
from sambasim.collectives.price import price
from sambasim.collectives.schedule import Algorithm

_SECONDS = st.floats(1e-9, 1e-3)
_PER_BYTE = st.floats(1e-12, 1e-8)
_LINK = st.builds(Link, _SECONDS, _PER_BYTE)
_LINKS = st.builds(Links, _LINK, _LINK, _PER_BYTE, st.booleans())


def _whole(size_bytes: float, nodes: int, ranks: int, links: Links) -> float:
    exchange = cheapest_exchange(size_bytes, nodes, ranks, links)
    return exchange.reduce_scatter.predicted_s + exchange.all_gather.predicted_s


@given(_LINKS, st.sampled_from([2, 4, 8]), st.integers(1, 64))
def test_on_one_node_it_is_the_cheapest_schedule_of_those_with_halves(links: Links, ranks: int, blocks: int) -> None:
    size_bytes = ranks * blocks
    cheapest = min(price(plan(way, size_bytes, (0,) * ranks), 1, links).predicted_s for way in HALVED)
    assert _whole(size_bytes, 1, ranks, links) == pytest.approx(cheapest)


@given(_LINKS, st.integers(2, 4), st.integers(2, 4), st.integers(1, 64))
def test_between_nodes_it_is_never_dearer_than_the_hierarchical_schedule(
    links: Links, nodes: int, ranks: int, blocks: int
) -> None:
    size_bytes = nodes * ranks * blocks
    node_of = tuple(rank // ranks for rank in range(nodes * ranks))
    hierarchical = price(plan(Algorithm.HIERARCHICAL, size_bytes, node_of), 1, links).predicted_s
    ours = _whole(size_bytes, nodes, ranks, links)
    assert ours <= hierarchical * (1 + 1e-9)
    exchange = cheapest_exchange(size_bytes, nodes, ranks, links)
    if exchange.within is exchange.between is Algorithm.DIRECT:
        assert ours == pytest.approx(hierarchical)


@given(_LINKS, st.integers(1, 40), st.integers(1, 16), st.floats(0, 1e9), st.floats(0, 1e9))
def test_more_bytes_are_never_quicker(links: Links, nodes: int, ranks: int, one: float, other: float) -> None:
    few, many = sorted((one, other))
    assert _whole(few, nodes, ranks, links) <= _whole(many, nodes, ranks, links)


def test_a_rank_alone_exchanges_nothing() -> None:
    alone = cheapest_exchange(1e9, 1, 1, Links(Link(1, 1), Link(1, 1), 1))
    assert (alone.within, alone.between) == (None, None)
    assert alone.reduce_scatter.predicted_s == alone.all_gather.predicted_s == 0
