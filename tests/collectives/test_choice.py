"""The choice, and whether its reason is true."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.collectives.choice import Choice, candidates, choose
from sambasim.collectives.links import Link, Links
from sambasim.collectives.plan import plan
from sambasim.collectives.price import price
from sambasim.collectives.schedule import Algorithm
from sambasim.errors import UserError
from sambasim.units import KIB, MIB

LINKS = Links(within=Link(1e-6, 1e-10), between=Link(1e-5, 1e-9), addition_s_per_byte=1e-10)
ONE_NODE = (0,) * 8
DEALT = (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("size_bytes", "node_of", "algorithm", "reason"),
    [
        (MIB, (0,), Algorithm.DIRECT, "direct: one rank has nothing to exchange."),
        (0, (0, 0), Algorithm.DIRECT, "direct: there are no bytes to exchange."),
        (
            64,
            ONE_NODE,
            Algorithm.RECURSIVE_DOUBLING,
            "recursive-doubling for 64 B among 8 ranks: predicted 3.0 us, against 6.0 us by halving-doubling, which"
            " spends 3.0 us more on latency.",
        ),
        (
            MIB,
            ONE_NODE,
            Algorithm.HALVING_DOUBLING,
            "halving-doubling for 1.0 MiB among 8 ranks: predicted 281.3 us, against 289.3 us by direct, which spends"
            " 8.0 us more on latency.",
        ),
        (
            MIB,
            (0, 0),
            Algorithm.DIRECT,
            "direct for 1.0 MiB among 2 ranks: predicted equal to halving-doubling, and first in the order of"
            " preference.",
        ),
        (
            16 * MIB,
            DEALT,
            Algorithm.HIERARCHICAL,
            "hierarchical for 16.0 MiB among 4 ranks: predicted 19.7 ms, against 26.5 ms by ring, which spends 6.7 ms"
            " more on bytes on the wire.",
        ),
    ],
)
def test_the_choice_and_its_reason(
    size_bytes: int, node_of: tuple[int, ...], algorithm: Algorithm, reason: str
) -> None:
    choice = choose(size_bytes, node_of, LINKS)
    assert (choice.algorithm, choice.reason) == (algorithm, reason)


@given(
    size_bytes=st.integers(0, 4 * KIB),
    node_of=st.lists(st.integers(0, 3), min_size=1, max_size=9),
    alpha=st.floats(0, 1e-3),
    beta=st.floats(0, 1e-6),
)
def test_no_alternative_is_cheaper_and_all_are_named_once(
    size_bytes: int, node_of: list[int], alpha: float, beta: float
) -> None:
    links = Links(Link(alpha, beta), Link(10 * alpha, 10 * beta), beta / 2)
    choice = choose(size_bytes, node_of, links)
    named = [choice.algorithm, *(each.algorithm for each in choice.alternatives)]
    assert sorted(named) == sorted(candidates(node_of))
    times_s = [each.price.predicted_s for each in choice.alternatives]
    assert times_s == sorted(times_s)
    assert choice.predicted_s <= times_s[0] * (1 + 1e-9)
    assert choice.predicted_s == price(plan(choice.algorithm, size_bytes, node_of), 1, links).predicted_s


def test_what_differs_only_by_rounding_is_equal() -> None:
    """The ring's sum of 8 rounds comes out some 1e-20 s below that of the 2 direct ones."""
    choice = choose(160 * KIB, (0,) * 5, LINKS)
    assert choice.alternatives[0].algorithm is Algorithm.RING
    assert choice.alternatives[0].price.predicted_s < choice.predicted_s
    assert choice.algorithm is Algorithm.DIRECT
    assert "predicted equal to ring" in choice.reason


def test_additions_can_decide() -> None:
    free = Link(0.0, 0.0)
    choice: Choice = choose(KIB, (0, 0, 0, 0, 0), Links(free, free, 1e-9))
    assert choice.algorithm is Algorithm.DIRECT
    by_name = {each.algorithm: each.price for each in choice.alternatives}
    assert by_name[Algorithm.BINOMIAL_TREE].predicted_s == by_name[Algorithm.BINOMIAL_TREE].addition_s
    assert by_name[Algorithm.BINOMIAL_TREE].addition_s == pytest.approx(3 * KIB * 1e-9)


@pytest.mark.parametrize(
    ("node_of", "two_levels"),
    [((0,), False), ((0, 0), False), ((0, 1), False), ((0, 0, 1), True), ((0, 1, 0, 1), True)],
)
def test_hierarchical_is_a_candidate_only_where_there_are_two_levels(
    node_of: tuple[int, ...], two_levels: bool
) -> None:
    assert (Algorithm.HIERARCHICAL in candidates(node_of)) is two_levels


def test_a_world_of_nobody_is_refused() -> None:
    with pytest.raises(UserError, match="at least one rank"):
        choose(KIB, (), LINKS)
