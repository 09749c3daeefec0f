"""Functions of `samba` and `samba.functional`: torch's operators under the same names, and SambaFlow's own.

Functions that make a tensor (`samba.zeros`) also take a name and a batch dimension.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional
from torch import Tensor

from sambasim.compiler.capture.trial import is_tracing
from sambasim.errors import OptionError
from sambasim.samba.notices import checks_keywords
from sambasim.samba.process import app_error
from sambasim.samba.tensor import from_torch_tensor

__all__ = ["addmm", "sn_imm", "sn_iteridx", "sn_select", "sn_zipmapreduce", "triu_fill"]

_MAKERS = (
    "arange", "as_tensor", "asarray", "bartlett_window", "blackman_window", "empty", "empty_like", "empty_permuted",
    "empty_strided", "eye", "from_file", "from_numpy", "frombuffer", "full", "full_like", "hamming_window",
    "hann_window", "kaiser_window", "linspace", "logspace", "normal", "ones", "ones_like", "rand", "rand_like",
    "randint", "randint_like", "randn", "randn_like", "randperm", "range", "scalar_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
"""Functions of torch that make a tensor."""


def _keywords(maker: str) -> list[str]:
    """Those of torch's schemas for it, and what makers without a schema take."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{maker}")
    others = {"buffer", "copy", "count", "device", "dtype", "input", "obj", "offset", "pin_memory"}
    return sorted(others.union(argument.name for schema in schemas for argument in schema.arguments) - {"self", "t"})


def _naming(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` of torch that returns a SambaTensor, and also takes its description, and `shape` for `size`."""
    called = function.__name__

    @checks_keywords(f"samba.{called}", _keywords(called))
    def make(
        *arguments: Any,
        name: str | None = None,
        batch_dim: int | None = None,
        named_dims: Iterable[str] | None = None,
        sized_dims: object = None,
        region_name: str | None = None,
        requires_grad: bool = False,
        shape: Iterable[int] | None = None,
        **torch_options: Any,
    ) -> Tensor:
        if shape is not None:
            torch_options["size"] = tuple(shape)
        tensor = function(*arguments, **torch_options)
        if is_tracing():  # the tensor stays plain
            return tensor
        named = from_torch_tensor(tensor, name, batch_dim, named_dims, sized_dims, region_name)
        return named.requires_grad_() if requires_grad else named

    make.__name__ = make.__qualname__ = called
    make.__doc__ = f"torch.{called} as a SambaTensor, which also takes the arguments of SambaTensor."
    return make


@checks_keywords()
def addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
    is_transposed: bool = False,
) -> Tensor:
    """`beta * input + alpha * (mat1 @ mat2)`: mat1 is [..., n, m], mat2 is [..., m, p], or [..., p, m] with
    `is_transposed`. Their leading dimensions broadcast, and `input` to the result, [..., n, p]; with beta 0 its values
    do not count."""
    second = mat2.mT if is_transposed else mat2
    if mat1.ndim == second.ndim == 2 or min(mat1.ndim, second.ndim) < 2:
        return torch.addmm(input, mat1, second, beta=beta, alpha=alpha, out=out)
    lead = torch.broadcast_shapes(mat1.shape[:-2], second.shape[:-2])  # type: ignore[no-untyped-call]  # torch's
    shape = (*lead, mat1.shape[-2], second.shape[-1])
    if second.ndim == 2:  # one matrix for all rows, as in a linear layer
        start = input if input.ndim < 2 else input.expand(shape).flatten(0, -2)
        result = torch.addmm(start, mat1.flatten(0, -2), second, beta=beta, alpha=alpha)
    else:
        stacks = [one.expand(*lead, *one.shape[-2:]).flatten(0, -3) for one in (mat1, second)]
        result = torch.baddbmm(input.expand(shape).flatten(0, -3), *stacks, beta=beta, alpha=alpha)
    result = result.view(shape)
    return result if out is None else torch.mul(result, 1, out=out)


@checks_keywords()
def triu_fill(input: Tensor, value: float) -> Tensor:
    """`input`, [..., rows, columns], with `value` above the main diagonal of its last two dimensions."""
    return input.masked_fill(torch.ones(input.shape[-2:], dtype=torch.bool, device=input.device).triu(1), value)


@checks_keywords()
def sn_imm(value: float, dtype: torch.dtype | None = None) -> Tensor:
    """A constant: a tensor without dimensions."""
    return torch.full((), value, dtype=dtype)


@checks_keywords()
def sn_select(cond: Tensor, a: Tensor | float, b: Tensor | float) -> Tensor:
    """`a` where `cond` is not 0, and `b` elsewhere; the shapes broadcast."""
    return torch.where(cond.bool(), a, b)


@checks_keywords()
def sn_iteridx(attrs: Mapping[str, Any], dim: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """The index of each element along `dim`: a tensor that broadcasts to `attrs["shape"]`."""
    shape = attrs["shape"]
    index = torch.arange(shape[dim], dtype=dtype)
    return index.reshape([-1 if axis == dim % len(shape) else 1 for axis in range(len(shape))])


@checks_keywords()
def sn_zipmapreduce(
    func: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    reduce_func: str | None = None,
    reduce_dim: Sequence[int] | int | None = None,
) -> Tensor:
    """`func(attrs, *tensors)`, called once with whole tensors, and a reduction of its result over `reduce_dim`, or over
    all dimensions. The shapes of `tensors` broadcast to `attrs["shape"]`. reduce_func: MIN, MAX, SUM, MEAN, or None"""
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))  # type: ignore[no-untyped-call]  # torch's
    mapped = func({"shape": shape}, *tensors).expand(shape)
    if reduce_func is None:
        return mapped
    reductions: Mapping[str, Callable[..., Tensor]]
    reductions = {"MIN": torch.amin, "MAX": torch.amax, "SUM": torch.sum, "MEAN": torch.mean}
    if reduce_func.upper() not in reductions:
        what = f"sn_zipmapreduce has no reduction {reduce_func}"
        raise app_error(OptionError, what, f"reduce_func is one of {', '.join(reductions)}")
    over = range(len(shape)) if reduce_dim is None else [reduce_dim] if isinstance(reduce_dim, int) else reduce_dim
    return reductions[reduce_func.upper()](mapped, [*over])


def _either(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    """`first`; and `second`, of the same name, for arguments that only this takes."""

    @functools.wraps(first)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return first(*arguments, **options)
        except (RuntimeError, TypeError, ValueError):  # the first for tensors in another order, as in embedding
            with contextlib.suppress(RuntimeError, TypeError):
                return second(*arguments, **options)
            raise

    return call


@functools.cache
def operators() -> Mapping[str, Callable[..., Any]]:
    """Every function of `samba` by name: torch's, those of nn.functional (both if they differ), and SambaFlow's own."""
    names = {*dir(torch._C._VariableFunctions), *torch.functional.__all__}  # its functions in C++ and in Python
    of_torch = {name: getattr(torch, name) for name in names if name[0] != "_" and hasattr(torch, name)}
    of_functional = {
        name: one
        for name, one in vars(torch.nn.functional).items()
        if name[0] != "_" and inspect.isroutine(one) and one.__module__ in ("torch.nn.functional", "torch._C._nn")
    }
    other = of_functional.keys() & of_torch.keys() - {"sigmoid", "tanh"}  # which only call torch's
    both = {name: _either(of_functional[name], of_torch[name]) for name in other}
    both |= {name: _either(of_torch[name], of_functional[name]) for name in ("softmax", "log_softmax")}
    makers = {name: _naming(getattr(torch, name)) for name in _MAKERS}
    return {**of_functional, **of_torch, **both, **makers, "addmm": addmm, "triu_fill": triu_fill}


def operator(name: str) -> Callable[..., Any]:
    """The operator of this name. Raises AttributeError if there is none."""
    if name.startswith("__") or name not in operators():  # Python probes for these
        raise AttributeError(f"sambasim.samba has no {name}")
    return operators()[name]


__getattr__, __dir__ = operator, operators  # apps also use them as `samba.functional.relu`
