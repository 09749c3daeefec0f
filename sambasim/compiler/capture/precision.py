"""The dtypes that a model is captured in: its own, or a narrow one for `--dtype bf16` and `fp16`. Losses then take
widened operands and give float32; functions of `ADDING` are widened and their results rounded, because their kernels
round after each addition."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from sambasim.errors import ModelError
from sambasim.ir.operators import LOSSES

STORED: Mapping[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By `--dtype`: the type of all floating-point numbers; None leaves to each tensor the type that it has."""

_NARROW = (torch.bfloat16, torch.float16)

ADDING = frozenset(f"aten.{name}" for name in (
    "avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default", "col2im.default", "embedding.default",
    "im2col.default", "index.Tensor", "index_put.default", "layer_norm.default", "logcumsumexp.default",
    "logsumexp.default", "max_pool2d.default", "max_pool3d.default", "pad.default", "prod.default", "prod.dim_int",
    "unfold.default",
))  # fmt: skip
"""Operators that add up (or multiply) in 16 bits, forward or backward, by torch 2.13 on a CPU; one has no kernel."""

_FUNCTIONS = {name.split(".")[1] for name in ADDING} | {"fold"}  # which is col2im; unfold is im2col too
_LOSSES = {name.split(".")[1].lstrip("_") for group in LOSSES for name in group.names}

_VIEWING = ("unfold", "__getitem__")
"""Functions that may give a view, and add up in their backward alone."""

_TYPED = {"float", "double", "half", "type"}
"""Functions whose result has the type that they say."""


@contextlib.contextmanager
def stored_in(dtype: torch.dtype | None, model: nn.Module) -> Iterator[None]:
    """The floating-point tensors of `model` are rounded to `dtype`, and it is torch's default. Afterwards the model has
    its own tensors again."""
    if dtype is None:
        yield
        return
    own = {id(tensor): (tensor, tensor.data) for tensor in (*model.parameters(), *model.buffers())}
    rounded: dict[tuple[int, torch.dtype], Tensor] = {}
    try:
        for tensor, data in own.values():
            if data.is_floating_point():
                tensor.data = _rounded(data, dtype, rounded)
        with default_type(dtype):
            yield
    finally:
        for tensor, data in own.values():
            tensor.data = data


class Widened(TorchFunctionMode):
    """Within it losses and the functions of `ADDING` take float32 for a narrow type, and what has the type of torch's
    default, if that is narrow, is made in float32 and rounded."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        leaves = tree_leaves((args, kwargs))
        if _is_typed_by_default(name, leaves):
            default = torch.get_default_dtype()
            with default_type(torch.float32):
                made = func(*args, **kwargs)
            return tree_map(lambda one: one.to(default) if _is_of(one, (torch.float32,)) else one, made)
        is_adding = name in _FUNCTIONS or (
            name == "__getitem__" and any(isinstance(leaf, Tensor) for leaf in tree_leaves(args[1]))
        )
        found = [leaf for leaf in leaves if _is_of(leaf, _NARROW)]
        adds_backward_alone = name in _VIEWING and not any(one.requires_grad for one in found)
        if not found or "out" in kwargs or adds_backward_alone or not (is_adding or name in _LOSSES):
            return func(*args, **kwargs)
        narrow = found[0].dtype
        args, kwargs = tree_map(lambda one: one.float() if _is_of(one, _NARROW) else one, (args, kwargs))
        result = func(*args, **kwargs)
        is_rounded = is_adding and not any(isinstance(leaf, torch.dtype) for leaf in leaves)
        return tree_map(lambda one: one.to(narrow) if _is_float(one) else one, result) if is_rounded else result


def inputs_in(dtype: torch.dtype | None, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
        for name, tensor in inputs.items()
    }


@contextlib.contextmanager
def default_type(dtype: torch.dtype) -> Iterator[None]:
    """Torch makes floating-point tensors of `dtype` where none is named."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _is_typed_by_default(name: str, given: Sequence[object]) -> bool:
    """Whether a result would be narrow only because that is torch's default: no operand is, and none is asked for."""
    if torch.get_default_dtype() not in _NARROW or name in _TYPED:
        return False
    return not any(_is_float(one) or isinstance(one, torch.dtype | np.ndarray | np.generic) for one in given)


def _rounded(data: Tensor, dtype: torch.dtype, rounded: dict[tuple[int, torch.dtype], Tensor]) -> Tensor:
    storage = data.untyped_storage()
    is_fake = isinstance(data, FakeTensor)
    key = storage._cdata if is_fake else storage.data_ptr(), data.dtype
    if key not in rounded and is_fake:
        rounded[key] = data.new_empty(storage.nbytes() // data.element_size(), dtype=dtype)
    elif key not in rounded:
        whole = torch.empty(0, dtype=data.dtype).set_(storage)
        rounded[key] = whole.to(dtype)
        if bool((rounded[key].isinf() & whole.isfinite()).any()):
            what = f"a parameter or buffer holds {float(whole.abs().max()):g}, which is infinite in {dtype}"
            raise ModelError(what, remedy="compile with --dtype bf16 or fp32")
    return rounded[key].as_strided(data.size(), data.stride(), data.storage_offset())


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _is_of(value: object, dtypes: Sequence[torch.dtype]) -> bool:
    return isinstance(value, Tensor) and value.dtype in dtypes
