"""A matrix product by oneDNN, as one operator that compiled code can call.

Inductor takes torch's own product, which is MKL's. For the shapes of linear layers oneDNN's is 5 to 10 % faster on
an AMD processor; on an Intel one MKL's is 2 to 10 % faster, and 25 % for the gradients of weights. For little work
oneDNN's start costs more than it saves. Its bits are its own.
"""

# What torch.library and torch.backends offer has no types.
# mypy: no-disallow-untyped-calls

from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.library import Library

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
