"""`samba.functional.stir`: SambaFlow's operators on single elements, computed with torch's.

A function of elements takes `attrs` first, then one argument for each tensor. Here it is called once, with whole
tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sambasim.errors import OptionError
from sambasim.samba.checks.keywords import checks_keywords
from sambasim.samba.checks.place import app_line

__all__ = ["sn_imm", "sn_iteridx", "sn_select", "sn_zipmapreduce"]

_REDUCTIONS: Mapping[str, Callable[..., Tensor]] = {
    "MIN": torch.amin,
    "MAX": torch.amax,
    "SUM": torch.sum,
    "MEAN": torch.mean,
}


@checks_keywords
def sn_imm(value: float, dtype: torch.dtype | None = None) -> Tensor:
    """A constant: a tensor of one element without dimensions."""
    return torch.full((), value, dtype=dtype)


@checks_keywords
def sn_select(cond: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """`a` where `cond` is not 0, and `b` elsewhere; the shapes broadcast."""
    return torch.where(cond.bool(), a, b)


@checks_keywords
def sn_iteridx(attrs: Mapping[str, Any], dim: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """The index of each element along `dim`: a tensor that broadcasts to `attrs["shape"]`."""
    shape = attrs["shape"]
    index = torch.arange(shape[dim], dtype=dtype)
    return index.reshape([-1 if axis == dim % len(shape) else 1 for axis in range(len(shape))])


@checks_keywords
def sn_zipmapreduce(
    func: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    reduce_func: str | None = None,
    reduce_dim: Sequence[int] | int | None = None,
) -> Tensor:
    """`func(attrs, *tensors)`, and a reduction of its result over the dimensions `reduce_dim`, which are removed.

    tensors: their shapes broadcast to one, which is `attrs["shape"]` and the shape of the result before the reduction
    reduce_func: MIN, MAX, SUM, MEAN, in any case of letters, or None for no reduction
    reduce_dim: None for all dimensions

    Raises OptionError for another reduction.
    """
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]  # torch's
    mapped = func({"shape": shape}, *tensors).expand(shape)
    if reduce_func is None:
        return mapped
    if reduce_func.upper() not in _REDUCTIONS:
        raise OptionError(
            f"sn_zipmapreduce has no reduction {reduce_func}",
            where=app_line(),
            remedy=f"reduce_func is one of {', '.join(_REDUCTIONS)}",
        )
    if reduce_dim is None:
        reduce_dim = range(len(shape))
    return _REDUCTIONS[reduce_func.upper()](mapped, [reduce_dim] if isinstance(reduce_dim, int) else [*reduce_dim])
