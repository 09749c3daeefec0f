"""Bring together a few numbers of every rank: the block sums of a norm, the losses of a step and what ranks wish."""

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import numpy as np

from sambasim.collectives.slices import NORM_BLOCK_ELEMENTS, Slice
from sambasim.ir.program import Program
from sambasim.runtime.ranks import Communicator

_FLOAT_BYTES = 8


def all_gather_floats(communicator: Communicator, own: Sequence[float], counts: Sequence[int]) -> list[float]:
    """Collective. The numbers of every rank, in rank order; rank r has `counts[r]` of them."""
    send = np.array(own, dtype=np.float64)
    receive = np.empty(sum(counts), dtype=np.float64)
    sizes = [count * _FLOAT_BYTES for count in counts]
    communicator.all_gather(send.view(np.uint8), receive.view(np.uint8), sizes)
    numbers: list[float] = receive.tolist()
    return numbers


def gather_losses(
    communicator: Communicator, losses: Sequence[float], wish: int, workers: Collection[int]
) -> tuple[list[float], int]:
    """Collective. The losses of all replicas, in rank order, and the largest wish; only `workers` have a replica."""
    counts = [1 + (rank in workers) for rank in range(communicator.world_size)]
    numbers = all_gather_floats(communicator, [wish, *losses], counts)
    firsts = list(accumulate(counts, initial=0))[:-1]
    wished = max(int(numbers[first]) for first in firsts)
    return [numbers[first + 1] for first, count in zip(firsts, counts, strict=True) if count > 1], wished


def gather_norms(
    program: Program,
    slices: Mapping[str, Sequence[Slice]],
    communicator: Communicator,
    sums: Mapping[str, Sequence[float]],
) -> list[float]:
    """Collective. All block sums, by group and then by rank: the order of the blocks in each group."""
    everything: list[float] = []
    for group in program.groups:
        counts = [-(-(stop - start) // NORM_BLOCK_ELEMENTS) for start, stop in slices[group.name]]
        everything += all_gather_floats(communicator, sums[group.name], counts)
    return everything
