"""Matrix products that are faster than torch's: our own kernel with the same bits, and oneDNN in compiled code.

Torch's product is MKL's. On a non-Intel CPU with AVX-512, MKL uses AVX2. There, our kernel takes 5 to 10 % less time
for most linear layers, and a quarter less where few rows meet weights that fit no cache. For each shape both are timed,
and the faster one is used.

That the bits are the same is tested, not assumed: before the kernel is used, it and torch multiply the same random
matrices with the same layout. The bits of an element depend on the order of additions, which does not depend on the
values. (Which NaN a sum of several NaNs becomes is not guaranteed.)

`--engine inductor` has bits of its own and may call oneDNN: for the shapes of linear layers, oneDNN is 5 to 10 % faster
than MKL on an AMD CPU; on an Intel CPU, MKL is 2 to 10 % faster, and 25 % for the gradients of weights.
"""

# torch.library and torch.backends are untyped.
# mypy: no-disallow-untyped-calls

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor
from torch.library import Library

from sambasim.runtime.kernels.product import Multiply, product_kernel

FEWEST_FLOPS = 1 << 23
"""Products below this are left to torch."""

_LIBRARY = Library("sambasim", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight) -> Tensor")


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default._op(x, weight, None, "none", [], "")
    return result


def _shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_LIBRARY.impl("linear", _linear, "CPU")
_LIBRARY.impl("linear", _shape, "Meta")

LINEAR = torch.ops.sambasim.linear.default
"""`x [m, k]` and `weight [n, k]`, both float32, to `x @ weight.T`, `[m, n]`."""


def by_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether `x @ weight.T` is faster by LINEAR."""
    if x.dtype is not torch.float32 or not torch.backends.mkldnn.is_available() or mkl_favours(Path("/proc/cpuinfo")):
        return False
    return 2 * x.shape[0] * x.shape[1] * weight.shape[0] >= FEWEST_FLOPS


@cache
def mkl_favours(processors: Path) -> bool:
    """Whether the machine that `processors` describes, in the form of Linux, is one that MKL is made for."""
    if not torch.backends.mkl.is_available():
        return False
    try:
        return "GenuineIntel" in processors.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


Function = Callable[..., object]

_RUNS = 3
"""How often both products are timed. The least time counts: what else runs on the machine only adds to it."""

_CLEARLY = 0.98
"""How much of torch's time ours may take at most. It takes more where few rows do not make good that the other operand
is copied, or where a long inner dimension leaves the caches."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in memory."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def new(self) -> Tensor:
        """A tensor that lies so; nothing is in it."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Operands:
    """How the operands of a product lie in memory: `a [m, k]`, `b [k, n]`, and a bias that is added, or None."""

    a: Layout
    b: Layout
    bias: Layout | None = None


class Products:
    """Sees, in one pass, how the operands of products lie in memory."""

    def __init__(self) -> None:
        self._seen: dict[int, Operands] = {}
        self._kernels: dict[Operands, Multiply | None] = {}

    def watched(self, position: int, function: Function) -> Function:
        """`function`, that of the instruction at `position`, which tells of its operands if it is torch's product."""

        def product(a: Tensor, b: Tensor) -> Tensor:
            self._seen[position] = Operands(Layout.of(a), Layout.of(b))
            return torch.mm(a, b)

        def sum_and_product(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
            self._seen[position] = Operands(Layout.of(a), Layout.of(b), Layout.of(bias))
            return torch.addmm(bias, a, b)

        if function is torch.mm:
            return product
        return sum_and_product if function is torch.addmm else function

    def quicker(self, position: int, out: Tensor | None = None) -> Function | None:
        """What is quicker for the instruction at `position`, and puts its result into `out`, or into a new tensor.

        None where nothing is, and before a pass has been seen.
        """
        operands = self._seen.get(position)
        if operands is None or (out is not None and not out.is_contiguous()):
            return None
        if operands not in self._kernels:
            self._kernels[operands] = quicker_product(operands)
        multiply = self._kernels[operands]
        return None if multiply is None else _bound(multiply, operands, out)


def quicker_product(operands: Operands) -> Multiply | None:
    """Our kernel for operands that lie so; None where torch's is as quick, or gives other bits."""
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
    return multiply if trial.has_the_bits() and trial.is_quicker() else None


def mkl_is_narrow() -> bool:
    """Whether MKL uses vectors of 8 numbers on a processor that has 16."""
    has_wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return has_wide and torch.backends.mkl.is_available() and not mkl_favours(Path("/proc/cpuinfo"))


@dataclass(frozen=True, slots=True)
class Trial:
    """Our kernel and torch's on the same random operands, zeros of both signs among them."""

    ours: Callable[[], object]
    torchs: Callable[[], object]
    results: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, multiply: Multiply, operands: Operands) -> "Trial":
        """Of `multiply`, which was made for operands that lie so."""
        generator = torch.Generator().manual_seed(0)  # a run's own numbers are not touched
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

    def has_the_bits(self) -> bool:
        """Whether ours gives the bits of torch's."""
        self.ours()
        self.torchs()
        first, second = self.results
        return torch.equal(first.view(torch.int32), second.view(torch.int32))

    def is_quicker(self) -> bool:
        """Whether ours takes less time than torch's. Which one it is decides no bit of a run."""
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

    def lie_otherwise(a: Tensor, b: Tensor) -> bool:
        """What makes the operands may have chosen so this time. The kernel would read what is not theirs."""
        return (
            a.stride() != a_layout.stride
            or b.stride() != b_layout.stride
            or a.shape != a_layout.shape
            or b.shape != b_layout.shape
            or not a.dtype == b.dtype == torch.float32
        )

    def product(a: Tensor, b: Tensor) -> Tensor:
        if lie_otherwise(a, b):
            return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
        result = a.new_empty(shape) if out is None else out
        multiply(None, a, b, result)
        return result

    def sum_and_product(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
        if lie_otherwise(a, b) or bias.stride() != (1,) or bias.shape != b_layout.shape[1:]:
            return torch.addmm(bias, a, b) if out is None else torch.addmm(bias, a, b, out=out)
        result = a.new_empty(shape) if out is None else out
        multiply(bias, a, b, result)
        return result

    return product if operands.bias is None else sum_and_product
