"""Matrix products by our own kernel (`kernels/product.c`), where it has the same bits as torch's and is faster.

Torch's product is MKL's. On a non-Intel CPU with AVX-512, MKL uses AVX2. There, our kernel takes 5 to 10 % less time
for most linear layers, and a quarter less where few rows meet weights that fit no cache. For each shape both are timed,
and the faster one is used.

That the bits are the same is tested, not assumed: before the kernel is used, it and torch multiply the same random
matrices with the same layout. The bits of an element depend on the order of additions, which does not depend on the
values. (Which NaN a sum of several NaNs becomes is not guaranteed.)
"""

# torch.backends is untyped.
# mypy: no-disallow-untyped-calls

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from sambasim.runtime.kernels.build import build

FEWEST_FLOPS = 1 << 23
"""Products below this are left to torch."""


Function = Callable[..., object]

Multiply: TypeAlias = Callable[[Tensor | None, Tensor, Tensor, Tensor], None]
"""`multiply(bias, a, b, out)` writes `a @ b` to `out`, plus `bias` in each row unless that is None.

The operands must have the layouts that it was made for."""

COLUMNS = 32
"""The kernel computes the result in panels of this many columns."""

_MKL_BLOCK = 192
"""MKL's AVX2 code sums blocks of this many products, then adds the sums."""

_RUNS = 3
"""How often both products are timed. The minimum counts, because other load only adds time."""

_CLEARLY = 0.98
"""Our kernel is used if it takes less than this fraction of torch's time. It is slower for few rows, because it copies
an operand, and for a long inner dimension, which exceeds the caches."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape, strides and dtype of a tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def new(self) -> Tensor:
        """An uninitialized tensor with this layout."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Operands:
    """The layouts of the operands of a product: `a [m, k]`, `b [k, n]`, and the bias, or None."""

    a: Layout
    b: Layout
    bias: Layout | None = None


class Products:
    """Records the layouts of products' operands in one pass, and then chooses the faster kernel for each."""

    def __init__(self) -> None:
        self._seen: dict[int, Operands] = {}
        self._kernels: dict[Operands, Multiply | None] = {}

    def watched(self, position: int, function: Function) -> Function:
        """`function`, the one of the instruction at `position`; it records its operands if it is torch's product."""

        def product(a: Tensor, b: Tensor) -> Tensor:
            self._seen[position] = Operands(Layout.of(a), Layout.of(b))
            return torch.mm(a, b)

        def sum_and_product(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
            self._seen[position] = Operands(Layout.of(a), Layout.of(b), Layout.of(bias))
            return torch.addmm(bias, a, b)

        if function is torch.mm:
            return product
        return sum_and_product if function is torch.addmm else function

    def faster(self, position: int, out: Tensor | None = None) -> Function | None:
        """A faster function for the instruction at `position`, which writes to `out` or returns a new tensor.

        None if there is none, or no pass has been recorded.
        """
        operands = self._seen.get(position)
        if operands is None or (out is not None and not out.is_contiguous()):
            return None
        if operands not in self._kernels:
            self._kernels[operands] = faster_product(operands)
        multiply = self._kernels[operands]
        return None if multiply is None else _bound(multiply, operands, out)


def faster_product(operands: Operands) -> Multiply | None:
    """Our kernel for these layouts; None if torch's is as fast or has other bits."""
    (rows, inner), columns = operands.a.shape, operands.b.shape[1]
    if 2 * rows * inner * columns < FEWEST_FLOPS:
        return None
    if operands.bias not in (None, Layout(torch.Size([columns]), (1,), torch.float32)):
        return None
    if torch.get_num_threads() != 1 or not mkl_is_narrow():
        return None
    multiply = product_kernel(operands.a.new(), operands.b.new())
    if multiply is None:
        return None
    trial = Trial.of(multiply, operands)
    return multiply if trial.same_bits() and trial.is_faster() else None


@cache
def mkl_favours(processors: Path) -> bool:
    """Whether torch has MKL and `processors`, a file like /proc/cpuinfo, describes an Intel CPU."""
    if not torch.backends.mkl.is_available():
        return False
    try:
        return "GenuineIntel" in processors.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def mkl_is_narrow() -> bool:
    """Whether MKL uses AVX2 on a CPU with AVX-512."""
    has_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_wide and torch.backends.mkl.is_available() and not mkl_favours(Path("/proc/cpuinfo"))


@dataclass(frozen=True, slots=True)
class Trial:
    """Our kernel and torch's on the same random operands, which include zeros of both signs."""

    ours: Callable[[], object]
    torchs: Callable[[], object]
    results: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, multiply: Multiply, operands: Operands) -> "Trial":
        """A trial of `multiply`, which was made for these layouts."""
        generator = torch.Generator().manual_seed(0)  # leaves the run's random numbers alone
        a, b = (layout.new().normal_(generator=generator) for layout in (operands.a, operands.b))
        for operand in (a, b):
            operand[0].zero_()
            operand[:, 0].neg_()
        bias = None if operands.bias is None else operands.bias.new().normal_(generator=generator)
        first = a.new_empty(a.shape[0], b.shape[1])
        second = torch.empty_like(first)
        ours = partial(multiply, bias, a, b, first)
        if bias is None:
            return cls(ours, partial(torch.mm, a, b, out=second), (first, second))
        return cls(ours, partial(torch.addmm, bias, a, b, out=second), (first, second))

    def same_bits(self) -> bool:
        """Whether both give the same bits."""
        self.ours()
        self.torchs()
        first, second = self.results
        return torch.equal(first.view(torch.int32), second.view(torch.int32))

    def is_faster(self) -> bool:
        """Whether ours takes less time than torch's. The choice changes no bit of a run."""
        times_s: tuple[list[float], list[float]] = ([], [])
        for _ in range(_RUNS):
            for product, of_product in zip((self.ours, self.torchs), times_s, strict=True):
                began_s = time.perf_counter()
                product()
                of_product.append(time.perf_counter() - began_s)
        ours_s, torchs_s = map(min, times_s)
        return ours_s < _CLEARLY * torchs_s


def _bound(multiply: Multiply, operands: Operands, out: Tensor | None) -> Function:
    a_layout, b_layout = operands.a, operands.b
    shape = (a_layout.shape[0], b_layout.shape[1])

    def differ(a: Tensor, b: Tensor) -> bool:
        """Whether the layouts differ from the recorded ones: the kernel would read other memory."""
        return (
            a.stride() != a_layout.stride
            or b.stride() != b_layout.stride
            or a.shape != a_layout.shape
            or b.shape != b_layout.shape
            or not a.dtype == b.dtype == torch.float32
        )

    def product(a: Tensor, b: Tensor) -> Tensor:
        if differ(a, b):
            return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
        result = a.new_empty(shape) if out is None else out
        multiply(None, a, b, result)
        return result

    def sum_and_product(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if differ(a, b) or bias.stride() != (1,) or bias.shape != b_layout.shape[1:]:
            return torch.addmm(bias, a, b) if out is None else torch.addmm(bias, a, b, out=out)
        result = a.new_empty(shape) if out is None else out
        multiply(bias, a, b, result)
        return result

    return product if operands.bias is None else sum_and_product


def product_kernel(a: Tensor, b: Tensor) -> Multiply | None:
    """The kernel for matrices with the dtypes and layouts of `a [m, k]` and `b [k, n]`; its result is dense `[m, n]`.

    None if the kernel does not support them or cannot be built here. It has the bits of MKL on non-Intel CPUs.
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

    # The default argument keeps the panel alive as long as the function.
    def multiply(bias: Tensor | None, a: Tensor, b: Tensor, out: Tensor, _panel: Tensor = panel) -> None:
        before = pointer(None if bias is None else bias.data_ptr())
        left, right, place = pointer(a.data_ptr()), pointer(b.data_ptr()), pointer(out.data_ptr())
        function(left, *a_strides, right, *b_strides, before, place, *sizes, last)

    return multiply


def block_of(inner: int) -> int:
    """How many of `inner` products MKL sums in a block; it halves an inner dimension between one and two blocks."""
    return inner // 2 if _MKL_BLOCK < inner < 2 * _MKL_BLOCK else min(inner, _MKL_BLOCK)


def _fits(a: Tensor, b: Tensor) -> bool:
    """Whether both operands have dense rows or columns, and the result consists of whole panels."""
    if min(*a.shape, *b.shape) == 0 or b.shape[1] % COLUMNS:
        return False
    return all(1 in operand.stride() and min(operand.stride()) > 0 for operand in (a, b))
