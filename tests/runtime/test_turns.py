"""Who is measured when: nobody is always behind the same one, and no run is lost."""

from collections import Counter
from itertools import chain, pairwise

import pytest

from sambasim.runtime.measure.collectives import order, runs_of_turns


@pytest.mark.parametrize("count", range(3, 10))
def test_everybody_follows_every_other_one_equally_often(count: int) -> None:
    turns = [order(count, turn) for turn in range(2 * count)]
    assert all(sorted(turn) == list(range(count)) for turn in turns)
    behind = Counter(chain.from_iterable(pairwise(turn) for turn in turns))
    assert behind == {(one, other): 2 for one in range(count) for other in range(count) if one != other}


@pytest.mark.parametrize("count", range(2, 10))
def test_nobody_follows_itself_from_one_turn_to_the_next(count: int) -> None:
    for before, after in pairwise(order(count, turn) for turn in range(4 * count)):
        assert before[-1] != after[0]


@pytest.mark.parametrize("runs", range(1, 130))
def test_all_runs_are_in_turns_of_about_ten_and_of_one_where_they_are_few(runs: int) -> None:
    turns = runs_of_turns(runs)
    assert sum(turns) == runs
    assert max(turns) - min(turns) <= 1
    assert len(turns) == min(runs, max(4, runs // 10))
