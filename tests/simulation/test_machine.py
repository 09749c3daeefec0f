"""What is derived from rates that were measured: other numbers of samples, and ranks that share cores."""

import pytest

from sambasim.simulation.machine import Machine, PassTimes, Rates, between
from sambasim.simulation.planning.here import spaced


def passes(samples: int, seconds: float, heap_bytes: int = 0) -> PassTimes:
    return PassTimes(samples, {"a": seconds, "b": 2 * seconds}, seconds / 10, seconds / 100, heap_bytes)


def rates(ranks: int, *of: PassTimes) -> Rates:
    return Rates(ranks, 1, 100, 60, of, 0.5, 0.7, 1e-6, 1e9)


def machine(cores: int, *of: Rates) -> Machine:
    return Machine(cores, 1 << 30, 1e10, 1e11, 0.0, of)


def test_a_pass_between_two_that_were_measured_is_on_the_line_between_them() -> None:
    known = (passes(2, 0.2, 100), passes(6, 1.0, 300))
    found = between(known, 3)
    assert found.samples == 3
    assert found.seconds == pytest.approx({"a": 0.4, "b": 0.8})
    assert (found.adding_s, found.batch_s, found.heap_bytes) == pytest.approx((0.04, 0.004, 150))
    assert between(known, 6) == known[1]
    assert between(known, 1).seconds == known[0].seconds, "no less than the fewest"
    assert between(known, 12).pass_s == pytest.approx(6.0), "in proportion beyond the most"


def test_ranks_that_share_cores_take_as_much_longer_and_what_changing_between_them_costs() -> None:
    two = machine(2, rates(1, passes(4, 1.0)), rates(2, passes(4, 1.1)), rates(4, passes(4, 2.42)))
    assert [two.rates_at(count).ranks for count in (1, 2, 3, 4)] == [1, 2, 2, 2]
    assert [two.crowd(count) for count in (1, 2)] == [1.0, 1.0]
    assert two.crowd(4) == pytest.approx(2 * 1.1), "2.42 of 2 × 1.1"
    assert two.crowd(3) == pytest.approx(1.5 * 1.05), "half of the 10 %"
    alone = machine(2, rates(1, passes(4, 1.0)), rates(2, passes(4, 1.1)))
    assert (alone.crowd(2), alone.crowd(3)) == (1.0, 1.5), "nothing was measured with more"


def test_three_ranks_on_two_cores_are_measured_too() -> None:
    three = rates(3, passes(4, 1.5 * 1.2))
    found = machine(2, rates(1, passes(4, 1.0)), rates(2, passes(4, 1.0)), three, rates(5, passes(4, 2.5 * 1.4)))
    assert [found.crowd(count) for count in (2, 3, 4, 5)] == pytest.approx([1.0, 1.5 * 1.2, 2 * 1.3, 2.5 * 1.4])


def test_the_most_samples_are_measured_with_a_half_a_quarter_and_the_fewest() -> None:
    assert spaced({1, 2, 3, 4, 6, 8, 12, 24}) == [1, 6, 12, 24]
    assert spaced({5}) == [5]
    assert spaced({3, 9}) == [3, 9]
