"""Tensors made for a session, and torch's operators under the same names.

`samba.cat`, `samba.sigmoid` and the like are torch's own functions, so a model whose `forward` calls them is traced as
if it called torch. What makes a tensor out of nothing (`samba.zeros`) takes a name and a batch dimension as well.
`addmm` and `triu_fill` are SambaFlow's own.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.nn.functional
from torch import Tensor

from sambasim.samba.absent import no_such_name
from sambasim.samba.checks.findings import KeywordError
from sambasim.samba.checks.keywords import checks_keywords, checks_keywords_beside
from sambasim.samba.checks.place import app_line
from sambasim.samba.tensor import SambaTensor, from_torch_tensor

__all__ = ["addmm", "randint", "randn", "triu_fill"]

_OF_EVERY_MAKER = ("dtype", "layout", "device", "pin_memory")

_MAKERS: Mapping[str, tuple[str, ...]] = {
    "arange": ("start", "end", "step", "out"),
    "empty": ("size", "memory_format", "out"),
    "empty_like": ("input", "memory_format"),
    "eye": ("n", "m", "out"),
    "full": ("size", "fill_value", "out"),
    "full_like": ("input", "fill_value", "memory_format"),
    "linspace": ("start", "end", "steps", "out"),
    "logspace": ("start", "end", "steps", "base", "out"),
    "normal": ("mean", "std", "size", "generator", "out"),
    "ones": ("size", "out"),
    "ones_like": ("input", "memory_format"),
    "rand": ("size", "generator", "out"),
    "rand_like": ("input", "memory_format", "generator"),
    "randint_like": ("input", "low", "high", "memory_format", "generator"),
    "randn_like": ("input", "memory_format", "generator"),
    "randperm": ("n", "generator", "out"),
    "zeros": ("size", "out"),
    "zeros_like": ("input", "memory_format"),
}
"""Functions of torch that make a tensor by themselves, so that the tensor may be given a name; and which keywords each
has beside `_OF_EVERY_MAKER`."""


def _naming(function: Callable[..., Tensor], keywords: Iterable[str]) -> Callable[..., SambaTensor]:
    """`function` of torch, which also takes what describes a SambaTensor, and `shape` for `size`."""

    @checks_keywords_beside(f"samba.{function.__name__}", (*keywords, *_OF_EVERY_MAKER))
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
            raise KeywordError(
                f"AP04: samba.{function.__name__} cannot be called so: {str(error).splitlines()[0]}",
                where=app_line(),
                remedy=f"give it the arguments of torch.{function.__name__}",
            ) from error
        if torch.compiler.is_compiling():
            # Inside a model's forward, which is being traced, a tensor is a value like any other.
            return cast(SambaTensor, tensor)
        named = from_torch_tensor(tensor, name, batch_dim, named_dims, sized_dims, region_name)
        if requires_grad:
            named.requires_grad_()
        return named

    make.__name__ = make.__qualname__ = function.__name__
    make.__doc__ = (
        f"torch.{function.__name__} as a SambaTensor: it takes torch's arguments, and name, batch_dim, named_dims, "
        "sized_dims and region_name. Raises DataError if there is no dimension `batch_dim`, and KeywordError "
        "for arguments that torch does not take."
    )
    return make


randn = _naming(torch.randn, ("size", "generator", "out"))
randint = _naming(torch.randint, ("low", "high", "size", "generator", "out"))


@checks_keywords
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
    """`beta * input + alpha * (mat1 @ mat2)`, as torch.addmm.

    mat1 is [n, m], mat2 is [m, p], or with `is_transposed` [p, m]; `input` broadcasts to the result, [n, p].
    """
    return torch.addmm(input, mat1, mat2.t() if is_transposed else mat2, beta=beta, alpha=alpha, out=out)


@checks_keywords
def triu_fill(input: Tensor, value: float) -> Tensor:
    """`input`, [..., rows, columns], with `value` above the main diagonal of its last two dimensions."""
    above = torch.ones(input.shape[-2:], dtype=torch.bool, device=input.device).triu(1)
    return input.masked_fill(above, value)


_OWN: Mapping[str, Callable[..., Any]] = {
    "addmm": addmm,
    "randint": randint,
    "randn": randn,
    "triu_fill": triu_fill,
}


@functools.cache
def operators() -> Mapping[str, Callable[..., Any]]:
    """Every function that `samba` has, by name: the operators of `torch` and of `torch.nn.functional`, the former where
    both have one, those that make a tensor, and SambaFlow's own."""
    overridable = torch.overrides.get_overridable_functions()
    known = {*overridable[torch], *overridable[torch.functional], *overridable[torch.nn.functional]}
    found = {
        name: function
        for module in (torch.nn.functional, torch)
        for name, function in vars(module).items()
        if not name.startswith("_") and callable(function) and function in known
    }
    makers = {name: _naming(getattr(torch, name), keywords) for name, keywords in _MAKERS.items()}
    return MappingProxyType({**found, **makers, **_OWN})


def operator(name: str) -> Callable[..., Any]:
    """The operator of this name. Raises AttributeError, with names that are near, if there is none."""
    if name.startswith("__"):  # what Python itself looks for, often and in vain
        raise AttributeError(f"sambasim.samba has no {name}")
    if name not in operators():
        raise no_such_name("sambasim.samba", name, operators())
    return operators()[name]


def __getattr__(name: str) -> Callable[..., Any]:
    """Apps have the operators under `samba.functional` too."""
    return operator(name)
