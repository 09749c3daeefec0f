"""The C kernel that multiplies matrices by a processor's tiles, as Python calls it."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeAlias

from torch import Tensor

from sambasim.runtime.kernels.build import build

TileProduct: TypeAlias = Callable[[Tensor | None, Tensor, Tensor, Tensor], None]
"""Takes a bias `[n]` or None, `a [m, k]`, `b [k, n]` and `out [m, n]`; writes to `out` the product, plus bias per row.

All are float32; bias and `out` are dense, and of `a` and `b` rows or columns are. Raises MemoryError if there is no
room for the numbers that are split.
"""

_PROCESSORS = Path("/proc/cpuinfo")


NO_TILES = "the processor has none"


@cache
def tile_product() -> TileProduct | None:
    """What multiplies float32 matrices by tiles; None where `why_no_tiles` says why.

    The result is as near to the exact one as float32's own arithmetic comes, and mostly nearer, but for the ends of the
    range, of which the kernel tells.
    """
    library = build("tile_product").library if has_tiles(_PROCESSORS) else None
    if library is None or not library.can_multiply():
        return None
    pointer, integer, function = ctypes.c_void_p, ctypes.c_int64, library.product
    operand = (pointer, integer, integer)
    function.argtypes = (*operand, *operand, pointer, pointer, integer, integer, integer)

    def multiply(bias: Tensor | None, a: Tensor, b: Tensor, out: Tensor) -> None:
        before = None if bias is None else bias.data_ptr()
        operands = (a.data_ptr(), *a.stride(), b.data_ptr(), *b.stride(), before, out.data_ptr())
        if function(*operands, *a.shape, b.shape[1]):
            raise MemoryError("no room for the numbers that a product splits")

    return multiply


def why_no_tiles() -> str | None:
    """Why there is no `tile_product` here: `NO_TILES`, or something else. None if there is one."""
    if tile_product() is not None:
        return None
    if not has_tiles(_PROCESSORS):
        return NO_TILES
    trouble = build("tile_product").trouble
    return "the system does not give them to this process" if trouble is None else trouble.what


def has_tiles(processors: Path) -> bool:
    """Whether the machine that `processors` describes, in the form of Linux, multiplies bfloat16 by tiles."""
    try:
        lines = processors.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return any("amx_bf16" in line.split() for line in lines if line.startswith("flags"))
