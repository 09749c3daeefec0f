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


def cut_at(groups: Sequence[tuple[Sequence[int], int]], world_size: int) -> list[tuple[Slice, ...]]:
    """As `cut`, of several groups, with cuts only at the places that each names, ascending, or at the ends of its
    elements. What a rank has too much of one group, it has less of the next ones."""
    found, carried = [], [0.0] * world_size
    for places, numel in groups:
        ends, cuts = sorted({0, *places, numel}), [0]
        for rank in range(1, world_size):
            wanted = rank * numel / world_size + carried[rank]
            at = bisect_left(ends, wanted)
            near = min(ends[max(at - 1, 0) : at + 1], key=lambda place: abs(place - wanted))
            cuts.append(max(near, cuts[-1]))
            carried[rank] = wanted - cuts[-1]
        found.append(tuple(pairwise([*cuts, numel])))
    return found


def pieces(start: int, stop: int, limit: int) -> tuple[Slice, ...]:
    """`start` to `stop` in pieces of `limit` elements, the last one shorter."""
    return tuple((at, min(at + limit, stop)) for at in range(start, stop, limit))
