"""Ring all-reduce: every rank hears the one before it and tells the one after it.

    phase            rounds   what one round does
    reduce-scatter   R - 1    member i adds what arrives; at the end it owns slice i + 1
    all-gather       R - 1    the owned slices travel once round the ring

Every rank sends 2 (R - 1) / R of the buffer, and no all-reduce can send less; the cost is a latency term that grows
with R. Source: Patarasuk & Yuan, J. Parallel Distrib. Comput. 69(2), 2009, doi:10.1016/j.jpdc.2008.09.002.
"""

from collections.abc import Sequence

from sambasim.collectives.schedule import Phase, Round, Rounds, Transfer, cut_span
from sambasim.collectives.slices import Slice


def ring(members: Sequence[int], span: Slice, granule: int) -> Rounds:
    """The rounds of an all-reduce of `span` round the ranks `members`, in the order given. A ring of one has none."""
    size = len(members)
    slices = cut_span(span, size, granule)

    def step(index: int, phase: Phase) -> Round:
        # All-gather starts one slice ahead: from the one that reduce-scatter has just finished.
        accumulate = phase is Phase.REDUCE_SCATTER
        lead = 0 if accumulate else 1
        return Round(
            phase,
            tuple(
                Transfer(members[i], members[(i + 1) % size], *slices[(i + lead - index) % size], accumulate)
                for i in range(size)
            ),
        )

    return tuple(step(index, phase) for phase in (Phase.REDUCE_SCATTER, Phase.ALL_GATHER) for index in range(size - 1))
