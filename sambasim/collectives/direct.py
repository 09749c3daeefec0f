"""Direct reduce-scatter and all-gather: every replica talks to every other, in one round each.

The schedule is data: the runtime carries it out, and the tests prove it on integers.

    phase            what happens
    reduce-scatter   rank r gets slice r of every peer's operand, and adds them by `tree`
    all-gather       rank r gets every other slice from its owner

Every rank sends and receives (N - 1) / N of the buffer in each phase, and no all-reduce can move less. Source: Thakur,
Rabenseifner, Gropp, Int. J. High Performance Computing Applications 19(1), 2005.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rank `source` lets rank `target` have its copy of slice `slice`."""

    source: int
    target: int
    slice: int


def reduce_scatter(world_size: int) -> tuple[Transfer, ...]:
    """The transfers of the one round of a direct reduce-scatter; the receiver owns the slice."""
    ranks = range(world_size)
    return tuple(Transfer(source, owner, owner) for owner in ranks for source in ranks if source != owner)


def all_gather(world_size: int) -> tuple[Transfer, ...]:
    """The transfers of the one round of a direct all-gather; the sender owns the slice."""
    ranks = range(world_size)
    return tuple(Transfer(owner, target, owner) for owner in ranks for target in ranks if target != owner)
