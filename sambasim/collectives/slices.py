"""How a group's flat tensor is cut into one slice for each replica.

Cuts lie at multiples of a granule: 64 elements, because the fused optimizer kernels treat a ragged tail differently
from the body; or 65,536 where a gradient norm is taken, because its squares are summed by blocks of that size, which
must not be cut, or the norm would depend on the number of replicas.
"""

from itertools import pairwise
from typing import TypeAlias

from sambasim.errors import InternalError

CUT_ELEMENTS = 64

Slice: TypeAlias = tuple[int, int]  # start and stop, in elements


def cut(numel: int, world_size: int, granule: int = CUT_ELEMENTS) -> tuple[Slice, ...]:
    """The slices of `numel` elements, one for each of `world_size` replicas, in rank order; some may be empty.

    They are disjoint, cover everything, and differ by at most one granule (and the ragged last one). Raises
    InternalError if the world size or the granule is not positive.
    """
    if world_size < 1 or granule < 1:
        raise InternalError(f"cannot cut for {world_size} replicas at multiples of {granule}")
    granules = -(-numel // granule)
    cuts = [min(rank * granules // world_size * granule, numel) for rank in range(world_size + 1)]
    return tuple(pairwise(cuts))


def pieces(start: int, stop: int, limit: int) -> tuple[Slice, ...]:
    """`start` to `stop` in pieces of `limit` elements, the last one shorter."""
    return tuple((at, min(at + limit, stop)) for at in range(start, stop, limit))
