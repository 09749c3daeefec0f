"""Binomial tree: whole buffers are summed towards the first rank, and the sum goes back the same way.

Its additions are those of `tree` for every number of ranks. Source: Thakur, Rabenseifner, Gropp, Int. J. High
Performance Computing Applications 19(1), 2005, doi:10.1177/1094342005051521.
"""

from collections.abc import Sequence

from sambasim.collectives.schedule import Phase, Round, Rounds, Transfer
from sambasim.collectives.slices import Slice


def binomial_tree(members: Sequence[int], span: Slice, _granule: int) -> Rounds:
    """The rounds of a reduce of `span` to the first of the ranks `members`, and of a broadcast from it."""
    size = len(members)
    strides = [1 << bit for bit in range((size - 1).bit_length())]
    pairs = [
        [(members[index], members[index + stride]) for index in range(0, size - stride, 2 * stride)]
        for stride in strides
    ]
    reduce = (Round(Phase.REDUCE, tuple(Transfer(far, near, *span, True) for near, far in level)) for level in pairs)
    broadcast = (
        Round(Phase.BROADCAST, tuple(Transfer(near, far, *span, False) for near, far in level))
        for level in reversed(pairs)
    )
    return (*reduce, *broadcast)
