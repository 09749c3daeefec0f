"""The mean of gradients over replicas, and the norm of all gradients, each added in one fixed order.

Mean: the binary tree of `collectives.tree`. Norm: squares are summed in float64 by blocks of 65,536 elements of a
group, and the block sums are added in order. A replica sums the blocks of the slices that it owns, and no slice cuts a
block. So the bits are the same whichever rank adds, and however many ranks share the work.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sambasim.collectives.slices import Slice, pieces
from sambasim.collectives.tree import Addition, additions
from sambasim.ir.types import NORM_BLOCK_ELEMENTS
from sambasim.runtime.kernels.tree_mean import Finish, Kernel, Sum, tree_mean_kernel

CHUNK_ELEMENTS = 131_072
"""Elements that are summed at a time. What one kernel leaves for the next is then still in a core's cache; with
fewer, the calls cost more than the arithmetic."""


class TreeMean:
    """The mean of the operands that `steps`, pairs of positions among them, add up in the first."""

    def __init__(self, steps: Sequence[Addition], divisor: int, dtype: torch.dtype) -> None:
        self._finish, self._number = _finish(divisor)
        self._add_up = tree_mean_kernel(steps, dtype) or torch_tree_mean(steps, dtype)
        self.scratch = torch.empty(CHUNK_ELEMENTS, dtype=dtype)
        """A place for a result that is read at once, and not kept."""

    def of(self, operands: Sequence[Tensor], out: Tensor, near: bool = False) -> Sum:
        """What makes `out` the mean of `operands`, whenever it is called; all are flat and of one length.

        `out` may be one of the operands: no element is written before it has been read from all. `near` says that all
        lie in a core's own cache.
        """
        return self._add_up(operands, out, self._finish, self._number, near)

    def total_of(self, operands: Sequence[Tensor], out: Tensor, near: bool = False) -> Sum:
        """As for the mean, but `out` becomes the sum."""
        return self._add_up(operands, out, Finish.KEEP, 1.0, near)


def _finish(divisor: int) -> tuple[Finish, float]:
    """What divides a sum by `divisor`."""
    if divisor == 1:
        return Finish.KEEP, 1.0
    if divisor & (divisor - 1) == 0:
        return Finish.MULTIPLY, 1 / divisor  # exact, so that the product has the bits of the quotient, in less time
    return Finish.DIVIDE, float(divisor)  # x * (1/3) is not x / 3


def torch_tree_mean(steps: Sequence[Addition], dtype: torch.dtype) -> Kernel:
    """The same by torch's operators: for every type, and where there is no C compiler."""
    # An operand must not be written to; from its first addition on, its sum has a place of its own.
    places = {into: torch.empty(CHUNK_ELEMENTS, dtype=dtype) for into, _ in steps}
    last = len(steps) - 1

    def bound(operands: Sequence[Tensor], out: Tensor, finish: Finish, number: float, near: bool) -> Sum:
        chunks = [
            ([operand[start:stop] for operand in operands], out[start:stop])
            for start, stop in pieces(0, out.numel(), CHUNK_ELEMENTS)
        ]

        def add_up() -> None:
            for parts, of_out in chunks:
                add_up_chunk(parts.copy(), of_out, finish, number)

        return add_up

    def add_up_chunk(sums: list[Tensor], out: Tensor, finish: Finish, number: float) -> None:
        for position, (into, source) in enumerate(steps):
            target = out if position == last else places[into][: out.numel()]
            sums[into] = torch.add(sums[into], sums[source], out=target)
        if not steps:
            out.copy_(sums[0])
        if finish is Finish.MULTIPLY:
            out.mul_(number)
        elif finish is Finish.DIVIDE:
            out.div_(number)

    return bound


def tree_mean(operands: Sequence[Tensor], out: Tensor, divisor: int) -> None:
    """`out` becomes the sum of `operands`, given in rank order, by `divisor`; all are flat and of one length.

    `out` may be one of the operands.
    """
    TreeMean(additions(len(operands)), divisor, out.dtype).of(operands, out)()


TORCH_CLIP_EPSILON = 1e-6
"""What torch.nn.utils.clip_grad_norm_ adds to the norm before it divides by it."""


def block_sums(gradient: Tensor, owned: Slice) -> list[float]:
    """The sums of squares of the blocks in `owned`, a slice of a group's flat gradient that starts at a block."""
    start, stop = owned
    return [float(gradient[a:b].double().square_().sum()) for a, b in pieces(start, stop, NORM_BLOCK_ELEMENTS)]


def total_norm(sums: Iterable[float]) -> float:
    """The norm, from all block sums in order."""
    total = 0.0
    for block in sums:
        total += block
    return math.sqrt(total)


def coefficient(norm: float, max_norm: float) -> float:
    """What gradients of this norm are multiplied by, so that it becomes at most `max_norm`, as torch does it."""
    return min(1.0, max_norm / (norm + TORCH_CLIP_EPSILON))


def clip(gradients: Sequence[Tensor], norm: float, max_norm: float) -> None:
    """Scale `gradients` in place so that their norm, `norm`, becomes at most `max_norm`."""
    scale = coefficient(norm, max_norm)
    if scale < 1.0:
        for gradient in gradients:
            gradient.mul_(scale)
