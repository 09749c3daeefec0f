"""Drawings, line by line."""

from textwrap import dedent

import pytest

from sambasim.collectives.draw import drawn
from sambasim.collectives.plan import plan
from sambasim.collectives.schedule import Algorithm

LEGEND = "+ is added to what the rank holds there, = replaces it; . receives nothing; a:b are elements a to b - 1"


def test_a_halving_among_three_ranks() -> None:
    text = """\
        halving-doubling: 3 ranks, 8 elements
        round                  rank 0       rank 1       rank 2
        1      fold            +0:8 from 1  .            .
        2      reduce-scatter  +0:4 from 2  .            +4:8 from 0
        3      all-gather      =4:8 from 2  .            =0:4 from 0
        4      unfold          .            =0:8 from 0  .
        sent                   16           8            8
        """
    assert drawn(plan(Algorithm.HALVING_DOUBLING, 8, (0, 0, 0))) == dedent(text) + LEGEND


def test_several_spans_stand_below_each_other_and_several_sources_on_one_line() -> None:
    text = """\
        direct: 3 ranks, 6 elements
        round                  rank 0         rank 1         rank 2
        1      reduce-scatter  +0:2 from 1 2  +2:4 from 0 2  +4:6 from 0 1
        2      all-gather      =2:4 from 1    =0:2 from 0    =0:2 from 0
                               =4:6 from 2    =4:6 from 2    =2:4 from 1
        sent                   8              8              8
        """
    assert drawn(plan(Algorithm.DIRECT, 6, (0, 0, 0))) == dedent(text) + LEGEND


def test_a_rank_that_receives_nothing_is_marked_once_a_round() -> None:
    text = """\
        direct: 3 ranks, 2 elements
        round                  rank 0       rank 1         rank 2
        1      reduce-scatter  .            +0:1 from 0 2  +1:2 from 0 1
        2      all-gather      =0:1 from 1  =1:2 from 2    =0:1 from 1
                               =1:2 from 2
        sent                   2            3              3
        """
    assert drawn(plan(Algorithm.DIRECT, 2, (0, 0, 0))) == dedent(text) + LEGEND


def test_nodes_are_named_where_there_is_more_than_one() -> None:
    text = """\
        hierarchical: 4 ranks, 4 elements
        round                                rank 0       rank 1       rank 2       rank 3
                                             node 0       node 1       node 0       node 1
        1      reduce-scatter within nodes   +0:2 from 2  +0:2 from 3  +2:4 from 0  +2:4 from 1
        2      reduce-scatter between nodes  +0:1 from 1  +1:2 from 0  +2:3 from 3  +3:4 from 2
        3      all-gather between nodes      =1:2 from 1  =0:1 from 0  =3:4 from 3  =2:3 from 2
        4      all-gather within nodes       =2:4 from 2  =2:4 from 3  =0:2 from 0  =0:2 from 1
        sent                                 6            6            6            6
        """
    assert drawn(plan(Algorithm.HIERARCHICAL, 4, (0, 1, 0, 1))) == dedent(text) + LEGEND


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_one_rank_has_no_rounds_to_draw(algorithm: Algorithm) -> None:
    assert drawn(plan(algorithm, 8, (0,))).splitlines() == [
        f"{algorithm}: 1 ranks, 8 elements",
        "round    rank 0",
        "sent     0",
        LEGEND,
    ]
