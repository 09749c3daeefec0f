"""Functions of `samba` and `samba.functional`: torch's operators under the same names, and SambaFlow's own.

Functions that make a tensor (`samba.zeros`) also take a name and a batch dimension.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional
from torch import Tensor

from sambasim.compiler.capture.trial import is_tracing
from sambasim.errors import DataError, OptionError
from sambasim.samba.notices import KeywordError, checks_keywords, no_such_name
from sambasim.samba.process import app_error
from sambasim.samba.tensor import SambaTensor, from_torch_tensor

__all__ = ["addmm", "randint", "randn", "sn_imm", "sn_iteridx", "sn_select", "sn_zipmapreduce", "triu_fill"]

_MAKERS = (
    "arange", "empty", "empty_like", "eye", "full", "full_like", "linspace", "logspace", "normal", "ones", "ones_like",
    "rand", "rand_like", "randint_like", "randn_like", "randperm", "zeros", "zeros_like",
)  # fmt: skip
"""Functions of torch that make a tensor."""

_KEYWORDS = (
    "base", "device", "dtype", "end", "fill_value", "generator", "high", "input", "layout", "low", "m", "mean",
    "memory_format", "n", "out", "pin_memory", "size", "start", "std", "step", "steps",
)  # fmt: skip
"""Keywords of these functions, each of some of them."""


def _naming(function: Callable[..., Tensor]) -> Callable[..., SambaTensor]:
    """`function` of torch that returns a SambaTensor, and also takes its description, and `shape` for `size`."""
    called = function.__name__

    @checks_keywords(f"samba.{called}", _KEYWORDS)
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
    ) -> SambaTensor:
        if shape is not None:
            torch_options["size"] = tuple(shape)
        try:
            tensor = function(*arguments, **torch_options)
        except TypeError as error:
            what = f"AP04: wrong arguments of samba.{called}: {str(error).splitlines()[0]}"
            raise app_error(KeywordError, what, f"give it the arguments of torch.{called}") from error
        if is_tracing():  # the tensor stays plain
            return cast(SambaTensor, tensor)
        named = from_torch_tensor(tensor, name, batch_dim, named_dims, sized_dims, region_name)
        if requires_grad:
            named.requires_grad_()
        return named

    make.__name__ = make.__qualname__ = called
    make.__doc__ = f"torch.{called} as a SambaTensor, which also takes the arguments of SambaTensor."
    return make


randn = _naming(torch.randn)
randint = _naming(torch.randint)


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
    do not count. Raises DataError for operands that do not fit."""
    try:
        second = mat2.mT if is_transposed else mat2
        if mat1.ndim <= 2 and second.ndim <= 2:
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
    except (IndexError, RuntimeError) as error:
        what = f"wrong operands of samba.addmm: {str(error).splitlines()[0]}"
        remedy = "mat1 is [..., n, m], mat2 [..., m, p], or [..., p, m] with is_transposed=True, and input [..., n, p]"
        raise app_error(DataError, what, remedy) from error


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


def _either(of_torch: Callable[..., Any], functional: Callable[..., Any]) -> Callable[..., Any]:
    """`of_torch`; and `functional`, of the same name in torch.nn.functional, for arguments that only this takes."""

    @functools.wraps(functional)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return of_torch(*arguments, **options)
        except (RuntimeError, TypeError):  # the second also for tensors in another order, as in torch.embedding
            return functional(*arguments, **options)

    return call


@functools.cache
def operators() -> Mapping[str, Callable[..., Any]]:
    """Every function of `samba` by name: those of `torch` and `torch.nn.functional` (both if they differ), those that
    make a tensor, and SambaFlow's own."""
    overridable = torch.overrides.get_overridable_functions()
    of_functional = (*overridable[torch.nn.functional], torch.nn.functional.hardsigmoid, torch.nn.functional.hardswish)
    known = {*overridable[torch], *overridable[torch.functional], *of_functional}
    named = {
        name: function
        for module in (torch.nn.functional, torch)
        for name, function in vars(module).items()
        if not name.startswith("_") and callable(function) and function in known
    }
    others = {name: vars(torch.nn.functional).get(name) for name in named}
    both = {name: _either(named[name], one) for name, one in others.items() if one in known and one is not named[name]}
    makers = {name: _naming(getattr(torch, name)) for name in _MAKERS}
    own = {"addmm": addmm, "randint": randint, "randn": randn, "triu_fill": triu_fill}
    return {**named, **both, **makers, **own}


def operator(name: str) -> Callable[..., Any]:
    """The operator of this name. Raises AttributeError, with names that are near, if there is none."""
    if name.startswith("__"):  # Python probes for these
        raise AttributeError(f"sambasim.samba has no {name}")
    if name not in operators():
        raise no_such_name("sambasim.samba", name, operators())
    return operators()[name]


__getattr__ = operator  # apps also use them as `samba.functional.relu`
