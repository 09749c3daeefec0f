"""A matrix product by oneDNN, as one operator that compiled code can call.

Inductor takes torch's own product, which is MKL's. oneDNN's is about a tenth faster for the shapes of linear layers on
processors that MKL does not favour, and takes the bias along; its bits are its own. For little work its start costs
more than it saves.
"""

# What torch.library and torch.backends offer has no types.
# mypy: no-disallow-untyped-calls

import torch
from torch import Tensor
from torch.library import Library

FEWEST_FLOPS = 1 << 23
"""Products below this are left to torch."""

_LIBRARY = Library("sambasim", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default._op(x, weight, bias, "none", [], "")
    return result


def _shape(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_LIBRARY.impl("linear", _linear, "CPU")
_LIBRARY.impl("linear", _shape, "Meta")

LINEAR = torch.ops.sambasim.linear.default
"""`x [m, k]`, `weight [n, k]`, `bias [n]` or None, all float32, to `x @ weight.T + bias`, `[m, n]`."""


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `x @ weight.T + bias` is one for LINEAR."""
    if not torch.backends.mkldnn.is_available() or x.dtype is not torch.float32:
        return False
    if bias is not None and bias.shape != weight.shape[:1]:
        return False
    return 2 * x.shape[0] * x.shape[1] * weight.shape[0] >= FEWEST_FLOPS
