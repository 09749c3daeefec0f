"""The Python binding of the C kernel for means."""

import ctypes
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TypeAlias

import torch
from torch import Tensor

from sambasim.collectives.tree import Addition
from sambasim.runtime.kernels.build import Build, build

_BLOCK_ELEMENTS = 64
"""Elements that are added at a time: their sums stay in the L1 cache."""

_REALS = {torch.float32: ("float", ctypes.c_float), torch.float64: ("double", ctypes.c_double)}
"""Narrower dtypes are rounded after each addition; torch does that."""


class Finish(IntEnum):
    """The operation on the sum and a number."""

    KEEP = 0
    MULTIPLY = 1
    DIVIDE = 2


Sum: TypeAlias = Callable[[], None]
"""Adds the operands that it was made for, at each call."""

Kernel: TypeAlias = Callable[[Sequence[Tensor], Tensor, Finish, float, bool], Sum]
"""`kernel(operands, out, finish, number, near)` makes the function that writes the finished sum to `out`; all are flat,
contiguous and of one length, and `out` may be one of the operands. `near`: all operands are in the core's own cache,
which changes no bit. Pointers are prepared once, because for small operands that takes longer than the sum."""


def tree_mean_build(dtype: torch.dtype) -> Build:
    """The library for float32 or float64."""
    finishes = (f"{finish.name}={finish.value}" for finish in Finish)
    return build("tree_mean", f"REAL={_REALS[dtype][0]}", f"BLOCK={_BLOCK_ELEMENTS}", *finishes)


def tree_mean_kernel(steps: Sequence[Addition], dtype: torch.dtype) -> Kernel | None:
    """The kernel for operands of `dtype`. `steps` are pairs of operand positions: each adds the second to the first.

    None if there is nothing to add, for other dtypes, and without a C compiler.
    """
    if not steps or dtype not in _REALS:
        return None
    library = tree_mean_build(dtype).library
    if library is None:
        return None
    pointer, integer, real, function = ctypes.c_void_p, ctypes.c_int32, _REALS[dtype][1], library.tree_mean
    function.restype = None
    places = torch.tensor(_places(steps), dtype=torch.int32)
    sums = torch.empty(len(steps) * _BLOCK_ELEMENTS, dtype=dtype)

    def bound(operands: Sequence[Tensor], out: Tensor, finish: Finish, number: float, near: bool) -> Sum:
        # Each is of the C type that the function takes: without `argtypes`, ctypes would pass an int as 32 bits.
        pointers = (pointer * len(operands))(*[operand.data_ptr() for operand in operands])
        given = (
            *(pointers, pointer(places.data_ptr()), integer(len(steps)), integer(near), pointer(sums.data_ptr())),
            *(pointer(out.data_ptr()), ctypes.c_int64(out.numel()), integer(finish), real(number)),
        )

        # The default argument keeps the tensors alive as long as the function.
        def add_up(_pointed_at: Sequence[Tensor] = (places, sums, out, *operands)) -> None:
            function(*given)

        return add_up

    return bound


def _places(steps: Sequence[Addition]) -> list[list[int]]:
    """For each step, the indices of its summands and of its sum: operands count from 0 up, sums from -1 down."""
    where: dict[int, int] = {}
    places = []
    for into, source in steps:
        total = where.get(into, -1 - len(where))  # a sum keeps its row when it is added to
        places.append([where.get(into, into), where.get(source, source), total])
        where[into] = total
    return places
