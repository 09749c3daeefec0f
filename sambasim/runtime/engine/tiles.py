"""A matrix product by the processor's tiles, as one operator that compiled code can call.

Tiles (Intel's AMX) multiply bfloat16, so the kernel splits each float32 into three. On a Xeon at 2.6 GHz, large
products of many rows take 0.6 to 0.9 of the time of MKL's, and come nearer to the exact result. The bits are its own.
So whether a job uses tiles is agreed upon by its ranks (`engine.choice`), and types and shapes decide what is
multiplied by them.
"""

# What torch.library offers has no types.
# mypy: no-disallow-untyped-calls

import torch
from torch import Tensor
from torch.library import Library

from sambasim.errors import InternalError
from sambasim.runtime.kernels.tile_product import tile_product

FEWEST_FLOPS = 1 << 24
"""Products below this gain less than the call costs."""

_FEWEST_ROWS = 192
_FEWEST_INNER = 64
_FEWEST_COLUMNS = 128
"""To split an operand pays when many blocks of the result use it. Measured on a Xeon at 2.6 GHz: with
192 rows it took 0.66 to 0.91 of MKL's time in 18 products; with 128, up to 0.99."""

_STEP = 32
"""Tiles multiply so many numbers of the inner dimension at once. Other lengths would be padded, number by number."""

_LIBRARY = Library("sambasim", "FRAGMENT")
_LIBRARY.define("product(Tensor a, Tensor b, Tensor? bias=None) -> Tensor")


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """`a [m, k]` times `b [k, n]`, plus `bias [n]` in each row, as `[m, n]`; all float32. `out` is dense.

    Raises InternalError for other operands and where there are no tiles, and MemoryError as the kernel does.
    """
    multiply = tile_product()
    if multiply is None:
        raise InternalError("a product by tiles on a processor without them")
    shape = torch.Size([a.shape[0], b.shape[1]])
    given = [one for one in (a, b, bias, out) if one is not None]
    # The kernel would read, or write, what is not theirs.
    fits = (
        all(one.dtype is torch.float32 for one in given)
        and a.shape[1] == b.shape[0] > 0
        and (bias is None or bias.shape == shape[1:])
        and (out is None or (out.shape == shape and out.is_contiguous()))
    )
    if not fits:
        raise InternalError(f"a product by tiles of {[(one.dtype, tuple(one.shape)) for one in given]}")
    a, b = (operand if 1 in operand.stride() else operand.contiguous() for operand in (a, b))
    result = a.new_empty(shape) if out is None else out
    multiply(None if bias is None else bias.contiguous(), a, b, result)
    return result


def _shape(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


_LIBRARY.impl("product", product, "CPU")
_LIBRARY.impl("product", _shape, "Meta")

PRODUCT = torch.ops.sambasim.product.default
"""`product`, for a graph of torch.fx."""


def by_tiles(a: Tensor, b: Tensor) -> bool:
    """Whether `a [m, k]` times `b [k, n]` is faster by `product`, where there are tiles, and with one thread."""
    (rows, inner), columns = a.shape, b.shape[1]
    is_float32 = a.dtype is torch.float32 and b.dtype is torch.float32
    is_wide = rows >= _FEWEST_ROWS and inner >= _FEWEST_INNER and columns >= _FEWEST_COLUMNS
    return is_float32 and is_wide and inner % _STEP == 0 and 2 * rows * inner * columns >= FEWEST_FLOPS
