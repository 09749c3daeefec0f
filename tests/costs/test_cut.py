"""The best cut, against all cuts of small graphs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain as joined
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sambasim.costs.cut import Level, best_cut, cut
from sambasim.costs.price import Load, SectionPrice, chip_bytes, load_of, price_of
from sambasim.costs.work import Work
from sambasim.hardware.budget import Budget
from tests.costs.graphs import chain, graph_and_work
from tests.costs.test_price import BUDGET

TIGHT = replace(BUDGET, stages=4, chip_bytes=200_000)


def _all_cuts(count: int, wall: int) -> Iterator[list[int]]:
    """Every way to end sections at numbers of stages, one of which is `wall`."""
    inner = range(1, count)
    for ends in joined.from_iterable(combinations(inner, size) for size in range(count)):
        if wall in (*ends, count):
            yield [*ends, count]


def _seconds(work: Work, ends: Sequence[int], budget: Budget) -> float | None:
    """What a cut is predicted to take; None for one that is not allowed."""
    total_s = 0.0
    for start, stop in pairwise((0, *ends)):
        load = load_of(work, start, stop, budget)
        fits = chip_bytes(load) <= budget.chip_bytes and stop - start <= budget.stages
        if stop - start > 1 and not fits:
            return None
        total_s += price_of(load, budget).predicted_s
    return total_s


@settings(max_examples=60)
@given(st.lists(st.sampled_from([32, 64, 256, 512]), min_size=2, max_size=8), st.integers(1, 7), st.booleans())
def test_no_cut_is_predicted_faster(widths: list[int], wall: int, tight: bool) -> None:
    work, budget = chain(widths), TIGHT if tight else BUDGET
    wall = min(wall, len(work.stages))
    count = len(work.stages)
    ends = best_cut(work, budget, [wall] * wall + [count] * (count - wall))
    assert wall in ends
    assert ends[-1] == len(work.stages)
    seconds = [_seconds(work, each, budget) for each in _all_cuts(len(work.stages), wall)]
    found = _seconds(work, ends, budget)
    assert found is not None
    assert found <= min(each for each in seconds if each is not None) * (1 + 1e-9)


@pytest.mark.parametrize("level", ["o1", "o3"])
def test_the_work_of_a_cut_grows_with_the_operators(level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many prices for each further operator, counted and not timed."""
    counted = Counter[str]()

    def counting(load: Load, budget: Budget) -> SectionPrice:
        counted["prices"] += 1
        return price_of(load, budget)

    monkeypatch.setattr("sambasim.costs.cut.price_of", counting)

    def prices(operators: int) -> int:
        counted.clear()
        graph, work = graph_and_work([64] * (operators + 1))
        cut(graph, work, BUDGET, level)
        return counted["prices"]

    few, more, most = prices(200), prices(400), prices(800)
    assert most - more == 2 * (more - few)
