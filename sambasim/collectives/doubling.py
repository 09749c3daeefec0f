"""Recursive doubling: partners at distance 1, 2, 4 … add each other's whole buffers.

The fewest rounds there are, and the most bytes: for buffers so small that only the number of messages counts. Source:
Thakur, Rabenseifner, Gropp, Int. J. High Performance Computing Applications 19(1), 2005, doi:10.1177/1094342005051521.
"""

from collections.abc import Sequence

from sambasim.collectives.folding import folded
from sambasim.collectives.schedule import Phase, Round, Rounds, Transfer
from sambasim.collectives.slices import Slice


def recursive_doubling(members: Sequence[int], span: Slice, granule: int) -> Rounds:
    """The rounds of an all-reduce of `span` among the ranks `members`; any number of them, the surplus is folded."""
    return folded(members, span, granule, _core)


def _core(members: Sequence[int], span: Slice, _granule: int) -> Rounds:
    size = len(members)
    return tuple(
        Round(
            Phase.EXCHANGE,
            tuple(Transfer(members[index ^ (1 << bit)], members[index], *span, True) for index in range(size)),
        )
        for bit in range(size.bit_length() - 1)
    )
