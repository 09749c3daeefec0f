"""The norm of all gradients, with the same bits however many replicas there are.

Squares are summed in float64 by blocks of 65,536 elements of a group; the block sums are added in order. A replica sums
the blocks of the slices that it owns, and no slice cuts a block.
"""

import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from sambasim.collectives.slices import Slice, pieces
from sambasim.ir.types import NORM_BLOCK_ELEMENTS

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
