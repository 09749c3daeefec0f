"""Tensors made for a session, and torch's operators under the same names.

`samba.cat`, `samba.sigmoid` and the like are torch's own functions, so a model whose `forward` calls them is traced as
if it called torch. What makes a tensor out of nothing (`samba.zeros`) takes a name and a batch dimension as well.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
import torch.nn.functional
from torch import Tensor

from sambasim.samba.absent import no_such_name
from sambasim.samba.checks.keywords import checks_keywords_beside
from sambasim.samba.tensor import SambaTensor, from_torch_tensor

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


@checks_keywords_beside("samba.randn", ("size", "generator", "out", *_OF_EVERY_MAKER))
def randn(
    *shape: Any,
    name: str | None = None,
    batch_dim: int | None = None,
    named_dims: Iterable[str] | None = None,
    requires_grad: bool = False,
    **torch_options: Any,
) -> SambaTensor:
    """Normal numbers as a SambaTensor: `samba.randn(4, 3, name="image", batch_dim=0)`. Other options are torch.randn's.

    Raises DataError if there is no dimension `batch_dim`.
    """
    return _named(torch.randn(*shape, **torch_options), name, batch_dim, named_dims, requires_grad)


@checks_keywords_beside("samba.randint", ("low", "high", "size", "generator", "out", *_OF_EVERY_MAKER))
def randint(
    *bounds_and_shape: Any,
    name: str | None = None,
    batch_dim: int | None = None,
    named_dims: Iterable[str] | None = None,
    shape: Iterable[int] | None = None,
    **torch_options: Any,
) -> SambaTensor:
    """Whole numbers from `low`, or 0, to below `high`: `samba.randint(10, (4,), name="label", batch_dim=0)` or
    `samba.randint(0, 10, (4,))`. Other options are torch.randint's.

    Raises DataError if there is no dimension `batch_dim`.
    """
    if shape is not None:
        torch_options["size"] = tuple(shape)
    return _named(torch.randint(*bounds_and_shape, **torch_options), name, batch_dim, named_dims, False)


@functools.cache
def operators() -> Mapping[str, Callable[..., Any]]:
    """Every function that `samba` has from torch, by name: the operators of `torch` and of `torch.nn.functional`, the
    former where both have one, and those that make a tensor."""
    overridable = torch.overrides.get_overridable_functions()
    known = {*overridable[torch], *overridable[torch.functional], *overridable[torch.nn.functional]}
    found = {
        name: function
        for module in (torch.nn.functional, torch)
        for name, function in vars(module).items()
        if not name.startswith("_") and callable(function) and function in known
    }
    makers = {name: _naming(getattr(torch, name), keywords) for name, keywords in _MAKERS.items()}
    return MappingProxyType({**found, **makers})


def operator(name: str) -> Callable[..., Any]:
    """The operator of this name. Raises AttributeError, with names that are near, if there is none."""
    if name.startswith("__"):  # what Python itself looks for, often and in vain
        raise AttributeError(f"sambasim.samba has no {name}")
    if name not in operators():
        raise no_such_name("sambasim.samba", name, (*operators(), "randn", "randint"))
    return operators()[name]


def _naming(function: Callable[..., Tensor], keywords: Iterable[str]) -> Callable[..., SambaTensor]:
    @checks_keywords_beside(f"samba.{function.__name__}", (*keywords, *_OF_EVERY_MAKER))
    def make(
        *arguments: Any,
        name: str | None = None,
        batch_dim: int | None = None,
        named_dims: Iterable[str] | None = None,
        requires_grad: bool = False,
        **torch_options: Any,
    ) -> SambaTensor:
        return _named(function(*arguments, **torch_options), name, batch_dim, named_dims, requires_grad)

    return functools.wraps(function)(make)


def _named(
    tensor: Tensor, name: str | None, batch_dim: int | None, named_dims: Iterable[str] | None, requires_grad: bool
) -> SambaTensor:
    if torch.compiler.is_compiling():
        # Inside a model's forward, which is being traced, a tensor is a value like any other.
        return cast(SambaTensor, tensor)
    named = from_torch_tensor(tensor, name, batch_dim, named_dims)
    named.requires_grad_(requires_grad)
    return named
