"""Weights: safetensors files with the names of the user's `state_dict`, digests, and tensors that
are cut over the ranks of a mesh."""

import errno
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sambasim.errors import MachineError, OptionError, WeightsError
from sambasim.ir.program import Program
from sambasim.ir.types import Cut, SymbolKind
from sambasim.pef.weights import bytes_of

_SAVED = (SymbolKind.PARAMETER, SymbolKind.BUFFER)
_STATE = (*_SAVED, SymbolKind.OPTIMIZER_STATE)


def save_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors of `state_dict`, atomically. Raises OptionError, MachineError."""
    write_tensors(path, tensors, "the weights", "--save FILE.safetensors")


def state_dict(program: Program, tensor_of: Callable[[str], Tensor]) -> Mapping[str, Tensor]:
    """Copies of parameters and buffers, by their names in the module's `state_dict`."""
    return {
        torch_name: tensor_of(symbol.name).clone()
        for symbol in program.symbols.values()
        if symbol.kind in _SAVED
        for torch_name in symbol.torch_names
    }


def write_tensors(path: Path, tensors: Mapping[str, Tensor], what: str, remedy: str) -> None:
    """Write a safetensors file atomically, and create its folders. Raises OptionError with `what` it holds and the
    `remedy`; MachineError if the disk is full."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(temporary, tensors)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        failure = f"{what} cannot be written to {path}"
        if os.strerror(errno.ENOSPC) in str(error):  # safetensors gives no errno
            raise MachineError(failure, where=str(error), remedy="free disk space, or name another place") from error
        raise OptionError(failure, where=str(error), remedy=remedy) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    path.touch()  # gives it the permissions of the user's other files; safetensors' own are for the owner alone
    permissions = path.stat().st_mode
    save_file(dict(tensors), path)
    path.chmod(permissions)


def load_weights(path: Path, program: Program) -> Mapping[str, Tensor]:
    """The parameters and buffers of `program`, by symbol, from a weights file. Raises WeightsError if unfit."""
    if not path.is_file():
        there = "a folder" if path.is_dir() else "not there"
        raise WeightsError(f"the weights file {path} is {there}", remedy="--weights FILE.safetensors, made by --save")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"{path} is no safetensors file: {error}", remedy="--weights takes what --save wrote"
        ) from error
    return fitting(tensors, program, f"the weights in {path}")


def fitting(tensors: Mapping[str, Tensor], program: Program, source: str) -> Mapping[str, Tensor]:
    """The parameters and buffers of `program`, by symbol, from `tensors` by the names of a state_dict; of tied names,
    one is enough. Raises WeightsError, which names their `source`, if unfit."""
    wanted = [symbol for symbol in program.symbols.values() if symbol.kind in _SAVED and symbol.torch_names]
    names = {name for symbol in wanted for name in symbol.torch_names}
    there = {symbol.name: [name for name in symbol.torch_names if name in tensors] for symbol in wanted}
    missing = [symbol.torch_names[0] for symbol in wanted if not there[symbol.name]]
    unknown = [name for name in tensors if name not in names]
    if missing or unknown:
        raise _misfit(source, program, f"missing {_few(missing)}; not in the model {_few(unknown)}")
    loaded = {symbol: tensors[found[0]] for symbol, found in there.items()}
    for first, *tied in there.values():
        for name in tied:
            if tensors[name] is not tensors[first] and bytes_of(tensors[name]) != bytes_of(tensors[first]):
                raise _misfit(source, program, f"{first} and {name} are one tensor of the model, and differ there")
    other = [
        f"{symbol.torch_names[0]} is {given} and not {symbol.whole}"
        for symbol in wanted
        if (given := _type(loaded[symbol.name])) != str(symbol.whole)
    ]
    if other:
        raise _misfit(source, program, _few(other))
    return loaded


def _misfit(source: str, program: Program, why: str) -> WeightsError:
    what = f"{source} do not fit the PEF {program.name}: {why}"
    return WeightsError(what, remedy="use the weights of a run of this model")


def _type(tensor: Tensor) -> str:
    """As `TensorType` writes it: `float32[3, 8]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "nothing"


def weights_sha256(program: Program, tensor_of: Callable[[str], Tensor]) -> str:
    return _digest(program, (SymbolKind.PARAMETER,), tensor_of).hexdigest()


def state_sha256(program: Program, tensor_of: Callable[[str], Tensor], steps: int) -> str:
    """Over parameters, buffers and optimizer states in name order, and the number of optimizer steps. The result of
    `tensor_of` is read before its next call."""
    digest = _digest(program, _STATE, tensor_of)
    digest.update(steps.to_bytes(8, "little"))
    return digest.hexdigest()


def tensor_sha256(tensor: Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def _digest(program: Program, kinds: Sequence[SymbolKind], tensor_of: Callable[[str], Tensor]) -> "hashlib._Hash":
    digest = hashlib.sha256()
    for name in sorted(name for name, symbol in program.symbols.items() if symbol.kind in kinds):
        digest.update(bytes_of(tensor_of(name)))
    return digest


def part(whole: Tensor, cut: Cut, position: int) -> Tensor:
    """The part of the rank at `position` along the axis of `cut`: a view, unless the dimension is several tensors."""
    shape, dim = whole.shape, cut.dim
    parts = whole.reshape(*shape[:dim], cut.outer, cut.parts, -1, *shape[dim + 1 :]).select(dim + 1, position)
    return parts.flatten(dim, dim + 1)


def joined(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """The whole tensor, from its parts in the order of ranks."""
    shape, dim = parts[0].shape, cut.dim
    outer = [one.reshape(*shape[:dim], cut.outer, -1, *shape[dim + 1 :]) for one in parts]
    return torch.stack(outer, dim + 1).flatten(dim, dim + 2)


def part_of(whole: Tensor, cuts: Sequence[Cut], at: Mapping[str, int]) -> Tensor:
    """The part that a rank with the coordinates `at` holds of a tensor."""
    for cut in cuts:
        whole = part(whole, cut, at[cut.axis])
    return whole
