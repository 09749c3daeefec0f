"""Who is measured when: runs are cut into turns, and in each turn everybody has one, in an order of its own."""

from collections.abc import Sequence

_FEWEST_TURNS = 4
_RUNS_FOR_A_TURN = 10


def runs_of_turns(runs: int) -> Sequence[int]:
    """How many of `runs` runs each turn has: a turn for each ten of them, but not fewer than four turns."""
    turns = min(max(_FEWEST_TURNS, runs // _RUNS_FOR_A_TURN), runs)
    return [runs // turns + (turn < runs % turns) for turn in range(turns)]


def order(count: int, turn: int) -> Sequence[int]:
    """The order of `count` candidates, by number, in turn `turn`: a Williams design.

    Who comes before leaves its bytes in the caches, and its load decides how fast the cores run. In `count` turns, or
    twice as many where that is odd, everybody follows every other one equally often, and no turn begins with whoever
    ended the one before. Source: E. J. Williams, Experimental designs balanced for the estimation of residual effects
    of treatments, 1949.
    """
    if count == 2:
        return (0, 1)  # turned round, each would follow itself
    zigzag = [(place + 1) // 2 if place % 2 else -(place // 2) for place in range(count)]
    turned = tuple((place + turn) % count for place in zigzag)
    return turned[::-1] if count % 2 and turn % 2 else turned
