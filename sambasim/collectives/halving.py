"""Recursive halving and doubling (Rabenseifner): the bytes of the ring in the rounds of a tree.

    phase            rounds   what one round does, for 2^k ranks
    reduce-scatter   k        partners at distance 1, 2, 4 … halve the span they share: each adds the other's half
    all-gather       k        the same pairs backwards: each stores the half that the other has finished

The widest spans go to the nearest rank, which in most layouts is on the same node; and the sums nest as the tree of
`tree` does, so that for 2^k ranks the bits are the same. Far partners first, as many libraries have it, would not
keep them. Source: Thakur, Rabenseifner, Gropp, Int. J. High Performance Computing Applications 19(1), 2005,
doi:10.1177/1094342005051521.
"""

from collections.abc import Sequence

from sambasim.collectives.folding import folded
from sambasim.collectives.schedule import Phase, Round, Rounds, Transfer, cut_span
from sambasim.collectives.slices import Slice


def halving_doubling(members: Sequence[int], span: Slice, granule: int) -> Rounds:
    """The rounds of an all-reduce of `span` among the ranks `members`; any number of them, the surplus is folded."""
    return folded(members, span, granule, _core)


def _core(members: Sequence[int], span: Slice, granule: int) -> Rounds:
    size = len(members)
    slices = cut_span(span, size, granule)
    held = [(0, size)] * size  # the slices, first to last, that each member still sums
    halvings: list[Round] = []
    doublings: list[Round] = []
    distance = 1
    while distance < size:
        halving: list[Transfer] = []
        doubling: list[Transfer] = []
        for index, (first, last) in enumerate(held):
            middle = (first + last) // 2
            partner = index ^ distance
            kept = (first, middle) if index < partner else (middle, last)
            start, stop = slices[kept[0]][0], slices[kept[1] - 1][1]
            halving.append(Transfer(members[partner], members[index], start, stop, True))
            doubling.append(Transfer(members[index], members[partner], start, stop, False))
            held[index] = kept
        halvings.append(Round(Phase.REDUCE_SCATTER, tuple(halving)))
        doublings.append(Round(Phase.ALL_GATHER, tuple(doubling)))
        distance *= 2
    return (*halvings, *reversed(doublings))
