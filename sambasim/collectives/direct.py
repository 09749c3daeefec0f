"""Direct reduce-scatter and all-gather: every rank talks to every other, in one round each.

    phase            rounds   what happens
    reduce-scatter   1        member i gets slice i of every peer, and adds them by `tree`
    all-gather       1        every member gets every other slice from its owner

Every rank sends and receives (R - 1) / R of the buffer in each phase, and no all-reduce can move less. This is the
schedule that the runtime carries out: its order of additions depends on the number of ranks alone.
"""

from collections.abc import Sequence

from sambasim.collectives.schedule import Phase, Round, Rounds, Transfer, cut_span
from sambasim.collectives.slices import Slice


def direct(members: Sequence[int], span: Slice, granule: int) -> Rounds:
    """The rounds of a direct all-reduce of `span` among the ranks `members`; the first is the reduce-scatter."""
    owned = tuple(zip(members, cut_span(span, len(members), granule), strict=True))
    return (
        Round(
            Phase.REDUCE_SCATTER,
            tuple(
                Transfer(peer, owner, start, stop, True)
                for owner, (start, stop) in owned
                for peer in members
                if peer != owner
            ),
        ),
        Round(
            Phase.ALL_GATHER,
            tuple(
                Transfer(owner, peer, start, stop, False)
                for owner, (start, stop) in owned
                for peer in members
                if peer != owner
            ),
        ),
    )
