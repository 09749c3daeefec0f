"""The C kernel that multiplies matrices, as Python calls it."""

import ctypes
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from sambasim.runtime.kernels.build import build

COLUMNS = 32
"""The columns of a result come in panels of so many."""

_MKL_BLOCK = 192
"""How many products MKL adds up before it adds up the sums, where it uses vectors of 8 numbers."""

Multiply: TypeAlias = Callable[[Tensor | None, Tensor, Tensor, Tensor], None]
"""Writes the product of the second and the third to the fourth, with the first, a bias, added to each row unless it is
None. All are laid out as those that it was made for."""


def product_kernel(a: Tensor, b: Tensor) -> Multiply | None:
    """What multiplies matrices of the types and layouts of `a [m, k]` and `b [k, n]`, to a dense `[m, n]`.

    None where the kernel was not written for these, or cannot be built here. It gives the bits that MKL gives on
    processors of other makers with vectors of 16 numbers.
    """
    if a.dtype is not torch.float32 or b.dtype is not torch.float32 or not _fits(a, b):
        return None
    library = build("product").library
    if library is None:
        return None
    (rows, inner), columns, function = a.shape, b.shape[1], library.product
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    function.restype = None
    block = block_of(inner)
    panel = torch.empty(block * COLUMNS)
    a_strides, b_strides = ([integer(stride) for stride in operand.stride()] for operand in (a, b))
    sizes, last = [integer(size) for size in (rows, inner, columns, block)], pointer(panel.data_ptr())

    # The panel lives as long as the function does: it is a default of it.
    def multiply(bias: Tensor | None, a: Tensor, b: Tensor, out: Tensor, _panel: Tensor = panel) -> None:
        before = pointer(None if bias is None else bias.data_ptr())
        left, right, place = pointer(a.data_ptr()), pointer(b.data_ptr()), pointer(out.data_ptr())
        function(left, *a_strides, right, *b_strides, before, place, *sizes, last)

    return multiply


def block_of(inner: int) -> int:
    """How many of `inner` products MKL adds up at a time: halves of what is a little too long for one block."""
    return inner // 2 if _MKL_BLOCK < inner < 2 * _MKL_BLOCK else min(inner, _MKL_BLOCK)


def _fits(a: Tensor, b: Tensor) -> bool:
    """Whether rows or columns of either operand are dense, and those of the result are whole panels."""
    if min(*a.shape, *b.shape) == 0 or b.shape[1] % COLUMNS:
        return False
    return all(1 in operand.stride() and min(operand.stride()) > 0 for operand in (a, b))
