"""The mean over replicas, in the one order that decides its bits: the tree of `collectives.tree`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sambasim.collectives.slices import pieces
from sambasim.collectives.tree import Addition, additions

CHUNK_ELEMENTS = 32_768
"""Elements that are summed at a time: the operands of a few replicas then fit a core's cache."""


class TreeMean:
    """The mean of the operands that `steps`, pairs of positions among them, add up in the first; and what it keeps from
    chunk to chunk."""

    def __init__(self, steps: Sequence[Addition], divisor: int, dtype: torch.dtype) -> None:
        self._steps = tuple(steps)
        self._divisor = divisor
        # An operand must not be written to; from its first addition on, its sum has a place of its own.
        self._sums = {into: torch.empty(CHUNK_ELEMENTS, dtype=dtype) for into, _ in self._steps}
        self.scratch = torch.empty(CHUNK_ELEMENTS, dtype=dtype)
        """A place for a mean that is read at once, and not kept."""

    def __call__(self, operands: Sequence[Tensor], out: Tensor) -> None:
        """`out` becomes the mean of `operands`; all are flat and of one length, at most CHUNK_ELEMENTS.

        `out` may be one of the operands: nothing is written to it before all have been read.
        """
        sums = list(operands)
        last = len(self._steps) - 1
        for number, (into, source) in enumerate(self._steps):
            target = out if number == last else self._sums[into][: out.numel()]
            sums[into] = torch.add(sums[into], sums[source], out=target)
        if not self._steps:
            out.copy_(sums[0])
        if self._divisor != 1:
            out.div_(self._divisor)  # and not a product with 1/N: x * (1/3) is not x / 3


def tree_mean(operands: Sequence[Tensor], out: Tensor, divisor: int) -> None:
    """`out` becomes the sum of `operands`, given in rank order, by `divisor`; all are flat and of one length.

    `out` may be one of the operands: nothing is written to it before all operands of a chunk have been read.
    """
    mean = TreeMean(additions(len(operands)), divisor, out.dtype)
    for start, stop in pieces(0, out.numel(), CHUNK_ELEMENTS):
        mean([operand[start:stop] for operand in operands], out[start:stop])
