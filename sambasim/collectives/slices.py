"""How a group's flat tensor is cut into one slice for each replica.

Cuts lie at multiples of 64 elements, because the fused optimizer kernels treat a ragged tail differently from the
body. Where a gradient norm is taken, they lie where its blocks begin: a block that is cut would have other bits.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeAlias

from sambasim.errors import InternalError

CUT_ELEMENTS = 64

Slice: TypeAlias = tuple[int, int]  # start and stop, in elements


def cut(numel: int, world_size: int) -> tuple[Slice, ...]:
    """The slices of `numel` elements, one for each of `world_size` replicas, in rank order; some may be empty.

    They are disjoint, cover everything, and differ by at most 64 elements (and a ragged end). Raises InternalError if
    the world size is not positive.
    """
    if world_size < 1:
        raise InternalError(f"cannot cut for {world_size} replicas")
    granules = -(-numel // CUT_ELEMENTS)
    cuts = [min(rank * granules // world_size * CUT_ELEMENTS, numel) for rank in range(world_size + 1)]
    return tuple(pairwise(cuts))


def cut_at(places: Sequence[int], numel: int, world_size: int) -> tuple[Slice, ...]:
    """As `cut`, with cuts only at `places`, ascending, or at the ends: each at the first place behind an equal cut."""
    ends = [*places, numel]
    cuts = [ends[bisect_left(ends, rank * numel // world_size)] for rank in range(1, world_size)]
    return tuple(pairwise([0, *cuts, numel]))


def pieces(start: int, stop: int, limit: int) -> tuple[Slice, ...]:
    """`start` to `stop` in pieces of `limit` elements, the last one shorter."""
    return tuple((at, min(at + limit, stop)) for at in range(start, stop, limit))
