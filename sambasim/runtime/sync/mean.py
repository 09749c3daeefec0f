"""The mean over replicas, in the one order that decides its bits: the tree of `collectives.tree`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sambasim.collectives.slices import pieces
from sambasim.collectives.tree import additions

CHUNK_ELEMENTS = 32_768
"""Elements that are summed at a time: the operands of a few replicas then fit a core's cache."""


def tree_mean(operands: Sequence[Tensor], out: Tensor, divisor: int) -> None:
    """`out` becomes the sum of `operands`, given in rank order, by `divisor`; all are flat and of one length.

    `out` may be one of the operands: nothing is written to it before all operands of a chunk have been read.
    """
    steps = additions(len(operands))
    for start, stop in pieces(0, out.numel(), CHUNK_ELEMENTS):
        sums = [operand[start:stop] for operand in operands]
        target = out[start:stop]
        for number, (into, source) in enumerate(steps):
            if number == len(steps) - 1:
                torch.add(sums[into], sums[source], out=target)
            else:
                sums[into] = torch.add(sums[into], sums[source])
        if not steps:
            target.copy_(sums[0])
        # A division, not a product with 1/N: x * (1/3) is not x / 3.
        target.div_(divisor)
