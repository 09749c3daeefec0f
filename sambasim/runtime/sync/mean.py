"""The mean over replicas, in the one order that decides its bits: the tree of `collectives.tree`."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sambasim.collectives.slices import pieces
from sambasim.collectives.tree import Addition, additions

CHUNK_ELEMENTS = 131_072
"""Elements that are summed at a time. What one operator leaves for the next is then still in a core's cache; with
fewer, the calls cost more than the arithmetic."""


class TreeMean:
    """The mean of the operands that `steps`, pairs of positions among them, add up in the first; and what it keeps from
    chunk to chunk."""

    def __init__(self, steps: Sequence[Addition], divisor: int, dtype: torch.dtype) -> None:
        self._steps = tuple(steps)
        self._scale = _scale(divisor, dtype)
        # An operand must not be written to; from its first addition on, its sum has a place of its own.
        self._sums = {into: torch.empty(CHUNK_ELEMENTS, dtype=dtype) for into, _ in self._steps}
        self.scratch = torch.empty(CHUNK_ELEMENTS, dtype=dtype)
        """A place for a result that is read at once, and not kept."""

    def __call__(self, operands: Sequence[Tensor], out: Tensor) -> None:
        """`out` becomes the mean of `operands`; all are flat and of one length, at most CHUNK_ELEMENTS.

        `out` may be one of the operands: nothing is written to it before all have been read.
        """
        self.total(operands, out)
        if self._scale is not None:
            self._scale(out)

    def total(self, operands: Sequence[Tensor], out: Tensor) -> None:
        """As for the mean, but `out` becomes the sum."""
        sums = list(operands)
        last = len(self._steps) - 1
        for number, (into, source) in enumerate(self._steps):
            target = out if number == last else self._sums[into][: out.numel()]
            sums[into] = torch.add(sums[into], sums[source], out=target)
        if not self._steps:
            out.copy_(sums[0])


def _scale(divisor: int, dtype: torch.dtype) -> Callable[[Tensor], object] | None:
    """What divides a sum by `divisor`, in place."""
    if divisor == 1:
        return None
    # Tensors, because torch makes a tensor of a number at each call, which takes longer than a small piece.
    if divisor & (divisor - 1) == 0:
        # Exact, so that the product has the bits of the quotient, in less time.
        reciprocal = torch.tensor(1 / divisor, dtype=dtype)
        return lambda total: torch.mul(total, reciprocal, out=total)
    number = torch.tensor(divisor, dtype=dtype)
    return lambda total: torch.div(total, number, out=total)  # x * (1/3) is not x / 3


def tree_mean(operands: Sequence[Tensor], out: Tensor, divisor: int) -> None:
    """`out` becomes the sum of `operands`, given in rank order, by `divisor`; all are flat and of one length.

    `out` may be one of the operands: nothing is written to it before all operands of a chunk have been read.
    """
    mean = TreeMean(additions(len(operands)), divisor, out.dtype)
    for start, stop in pieces(0, out.numel(), CHUNK_ELEMENTS):
        mean([operand[start:stop] for operand in operands], out[start:stop])
