"""How an algorithm for 2^k ranks serves any number of them.

With 2^k the largest power of two that is not above R, the first R - 2^k pairs of neighbours fold: the second of a pair
hands its whole buffer to the first before, and gets the result from it after. Source: Thakur, Rabenseifner, Gropp, Int.
J. High Performance Computing Applications 19(1), 2005, doi:10.1177/1094342005051521.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from sambasim.collectives.schedule import Phase, Round, Rounds, Transfer
from sambasim.collectives.slices import Slice

Core: TypeAlias = Callable[[Sequence[int], Slice, int], Rounds]  # ranks, a power of two of them; span; granule


def power_of_two_within(count: int) -> int:
    """The largest power of two that is at most `count`, which is positive."""
    return 1 << (count.bit_length() - 1)


def folded(members: Sequence[int], span: Slice, granule: int, core: Core) -> Rounds:
    """`core` among as many of `members` as it can use, with the surplus folded in before and unfolded after."""
    surplus = len(members) - power_of_two_within(len(members))
    keepers, guests = members[: 2 * surplus : 2], members[1 : 2 * surplus : 2]
    pairs = tuple(zip(keepers, guests, strict=True))
    rounds = core((*keepers, *members[2 * surplus :]), span, granule)
    if not pairs:
        return rounds
    fold = Round(Phase.FOLD, tuple(Transfer(guest, keeper, *span, True) for keeper, guest in pairs))
    unfold = Round(Phase.UNFOLD, tuple(Transfer(keeper, guest, *span, False) for keeper, guest in pairs))
    return (fold, *rounds, unfold)
