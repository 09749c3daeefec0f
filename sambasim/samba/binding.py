"""A batch to the inputs of a PEF: by name, and by position where tensors have no name."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sambasim.errors import DataError
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.samba import context
from sambasim.samba.checks.place import app_line
from sambasim.samba.request import Inputs, check_on_host, flat, name_of
from sambasim.samba.tensor import to_torch


def inputs_of(program: Program) -> Mapping[str, Symbol]:
    """The inputs of `program`, by name."""
    return {name: symbol for name, symbol in program.symbols.items() if symbol.kind is SymbolKind.INPUT}


def bind(wanted: Mapping[str, Symbol], batch_size: int, model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Plain tensors by input symbol, in the order in which `inputs` gives them; `wanted` are those of the program.

    Raises DataError, with both sides, for a tensor that fits no input, and for an input that no tensor is given for.
    """
    tensors = flat(inputs)
    keys: list[str | None] = [name_of(tensor) for tensor in tensors]
    if isinstance(inputs, Mapping):
        keys = [name for name, tensor in inputs.items() if tensor is not None]
    if keys == [*wanted]:  # what most apps give in each step
        plain = map(to_torch, tensors)
        return {name: _fitting(name, wanted, tensor, batch_size) for name, tensor in zip(wanted, plain, strict=True)}
    _check_names(keys, wanted, model)
    free = (name for name in wanted if name not in keys)
    bound: dict[str, Tensor] = {}
    for key, tensor in zip(keys, tensors, strict=True):
        name = key if key in wanted else next(free, None)
        if name is None:
            raise DataError(
                f"{len(tensors)} tensors are given, and the PEF has {len(wanted)} inputs: {', '.join(wanted)}",
                remedy="give one tensor for each input",
            )
        bound[name] = _fitting(name, wanted, to_torch(tensor), batch_size)
    missing = [name for name in wanted if name not in bound]
    if missing:
        raise DataError(
            f"no tensor is given for the input {', '.join(missing)} of the PEF",
            remedy="give one tensor for each input, with its name= or in its place",
        )
    return bound


def _check_names(keys: list[str | None], wanted: Mapping[str, Symbol], model: nn.Module) -> None:
    unknown = [key for key in keys if key is not None and key not in wanted]
    if unknown:
        raise DataError(
            f"a tensor is called {unknown[0]}, and {type(model).__name__} was compiled with the inputs "
            f"{', '.join(wanted)}",
            remedy=f"name it as when it was compiled: name={next(iter(wanted), '')!r}",
        )
    twice = next((key for key in keys if key is not None and keys.count(key) > 1), None)
    if twice is not None:
        raise DataError(f"two tensors are called {twice}", remedy="give each a name= of its own")


def _fitting(name: str, wanted: Mapping[str, Symbol], tensor: Tensor, batch_size: int) -> Tensor:
    """`tensor`, if it can be the input `name` of those that are wanted."""
    symbol = wanted[name]
    if not isinstance(tensor, Tensor):
        raise DataError(
            f"{name} is of type {type(tensor).__name__}, and must be a tensor",
            where=app_line(),
            remedy=f"give one tensor for {name}, and not several",
        )
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.shape == symbol.type.shape and tensor.dtype is getattr(torch, symbol.type.dtype) and tensor.is_cpu:
        return tensor
    check_on_host(name, tensor)
    shape, given = symbol.type.shape, tuple(tensor.shape)
    if shape[1:] == given[1:] and len(shape) == len(given) and given[0] < batch_size:
        is_as_typed = getattr(context.current().arguments, "batch_size", None) == batch_size
        reason = "the DataLoader makes smaller ones" if is_as_typed else "-b is another than when the PEF was compiled"
        remedy = f"and batch_size={batch_size}" if is_as_typed else f"or -b {batch_size}"
        raise DataError(
            f"AP01: {name} has {given[0]} samples, and the PEF takes {batch_size} at a time: it is the end of the data "
            f"set, or {reason}",
            where=app_line(),
            remedy=f"give drop_last=True to the DataLoader; {remedy}",
        )
    if shape[1:] == given[1:] and len(shape) == len(given) and given[0] > batch_size:
        raise DataError(
            f"AP01: {name} has {given[0]} samples, and the PEF takes {batch_size} at a time",
            where=app_line(),
            remedy=f"-b {batch_size}, or compile again with -b {given[0]}",
        )
    if shape[:1] == given[:1] and [n for n in shape if n != 1] == [n for n in given if n != 1]:
        tensor = tensor.reshape(shape)  # a label of [batch, 1], say, for one of [batch]
    elif shape != given:
        raise DataError(
            f"{name} has the shape {given}, and the PEF was compiled for {shape}",
            where=app_line(),
            remedy=_remedy_of_shape(wanted, given),
        )
    floating = symbol.type.dtype.startswith(("float", "bfloat"))
    if floating is not tensor.is_floating_point():
        raise DataError(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}, and the PEF was compiled for {symbol.type.dtype}",
            remedy=f"give {name} as {symbol.type.dtype}",
        )
    if not floating and tensor.numel():
        _check_range(name, symbol, tensor)
    return tensor


def _remedy_of_shape(wanted: Mapping[str, Symbol], given: tuple[int, ...]) -> str:
    twin = next((name for name, symbol in wanted.items() if symbol.type.shape == given), None)
    if twin is not None:
        return f"{twin} has this shape: give {', '.join(wanted)} in this order, each by its own name if it has one"
    return "compile again with this shape (-b is the batch size), or change what the DataLoader gives"


def _check_range(name: str, symbol: Symbol, tensor: Tensor) -> None:
    """Raises DataError for a whole number that the input's type cannot hold."""
    dtype = getattr(torch, symbol.type.dtype)
    if dtype in (tensor.dtype, torch.int64) or dtype is torch.bool:
        return
    limits = torch.iinfo(dtype)
    least, most = int(tensor.min()), int(tensor.max())
    if least < limits.min or most > limits.max:
        raise DataError(
            f"{name} has {most if most > limits.max else least}, which {symbol.type.dtype} cannot hold",
            remedy=f"compile with {name} as {str(tensor.dtype).removeprefix('torch.')}",
        )
