"""How a value lies over the ranks of one axis, and how a cut dimension passes through a view."""

from dataclasses import dataclass
from functools import cache
from math import prod

from sambasim.ir.types import Cut, TensorType


@dataclass(frozen=True, slots=True)
class Layout:
    """The placement of a value, in DTensor's terms: `whole` is Replicate, `partial` is Partial (the value is the sum of
    what the ranks have), `cut` is Shard(dim): each rank has an equal part along `dim`. With `outer` above 1, that
    dimension is a concatenation of `outer` tensors, and each rank has a part of each of them."""

    kind: str
    dim: int = 0
    outer: int = 1

    def __str__(self) -> str:
        return self.kind if self.kind != "cut" else f"cut({self.dim}{f', outer {self.outer}' * (self.outer > 1)})"


WHOLE = Layout("whole")
PARTIAL = Layout("partial")


@cache
def cut(dim: int, outer: int = 1) -> Layout:
    return Layout("cut", dim, outer)


def fits(shape: tuple[int, ...], layout: Layout, ranks: int) -> bool:
    """Whether a tensor of `shape` can have `layout`: the dimension must divide evenly into `outer` × `ranks` parts."""
    if layout.kind != "cut":
        return True
    size = shape[layout.dim] if layout.dim < len(shape) else 0
    return size > 0 and size % (layout.outer * ranks) == 0


def part_type(whole: TensorType, layout: Layout, ranks: int) -> TensorType:
    """The type of a rank's part."""
    if layout.kind != "cut":
        return whole
    shape = list(whole.shape)
    shape[layout.dim] //= ranks
    return TensorType(whole.dtype, tuple(shape))


def cut_of(layout: Layout, axis: str, ranks: int) -> tuple[Cut, ...]:
    return (Cut(axis, layout.dim, ranks, layout.outer),) if layout.kind == "cut" else ()


def through_view(before: tuple[int, ...], after: tuple[int, ...], layout: Layout, ranks: int) -> Layout | None:
    """The layout of a cut tensor after a view of its elements as `after`; None if parts would not stay parts.

    In the order of elements, a cut is a number of blocks, `left`, each in `ranks` equal pieces. A dimension of `after`
    has the same pieces if its blocks are as many and its extent is divided evenly.
    """
    left = prod(before[: layout.dim]) * layout.outer
    for dim, extent in enumerate(after):
        blocks, rest = divmod(left, max(prod(after[:dim]), 1))
        found = cut(dim, blocks)
        if rest == 0 and blocks > 0 and extent > blocks and fits(after, found, ranks):
            return found
    return None
