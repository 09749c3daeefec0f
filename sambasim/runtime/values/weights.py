"""Weights: safetensors files with the names of the user's `state_dict`, digests, and tensors that
are cut over the ranks of a mesh."""

import errno
import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
    tensors: dict[str, Tensor] = {}
    for symbol in program.symbols.values():
        if symbol.kind in _SAVED and symbol.torch_names:
            tensor = tensor_of(symbol.name)
            tensors |= {torch_name: tensor.clone() for torch_name in symbol.torch_names}
    return tensors


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
    loaded = {symbol: tensors[names_there[0]] for symbol, names_there in there.items()}
    for first, *tied in there.values():
        for name in tied:
            if tensors[name] is not tensors[first] and bytes_of(tensors[name]) != bytes_of(tensors[first]):
                raise _misfit(source, program, f"{first} and {name} are one tensor of the model, and differ there")
    other = [
        f"{symbol.torch_names[0]} is {type_} and not {symbol.whole}"
        for symbol in wanted
        if (type_ := _type(loaded[symbol.name])) != str(symbol.whole)
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
    """Over the parameters in name order."""
    return state_of(program, tensor_of, 0, (SymbolKind.PARAMETER,)).weights_sha256


@dataclass(frozen=True, slots=True)
class State:
    """What a run has trained: digests of the parameters and of the whole state; and copies of parameters and buffers,
    by their names in the module's `state_dict`, if they are wanted."""

    weights_sha256: str
    state_sha256: str
    tensors: Mapping[str, Tensor]


def state_of(
    program: Program,
    tensor_of: Callable[[str], Tensor],
    steps: int,
    kinds: Collection[SymbolKind] = _STATE,
    *,
    keeps_tensors: bool = False,
) -> State:
    """The state after `steps` optimizer steps: symbols of `kinds`, in name order. Calls `tensor_of` once for each."""
    weights, state, kept = hashlib.sha256(), hashlib.sha256(), {}
    for name, symbol in sorted(program.symbols.items()):
        if symbol.kind not in kinds:
            continue
        tensor = tensor_of(name)
        state.update(bytes_of(tensor))
        if symbol.kind is SymbolKind.PARAMETER:
            weights.update(bytes_of(tensor))
        if keeps_tensors and symbol.kind in _SAVED:
            kept[name] = tensor
    state.update(steps.to_bytes(8, "little"))
    tensors = state_dict(program, kept.pop) if keeps_tensors else {}
    return State(weights.hexdigest(), state.hexdigest(), tensors)


def tensor_sha256(tensor: Tensor) -> str:
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def part(whole: Tensor, cut: Cut, position: int) -> Tensor:
    """The part of the rank at `position` along the axis of `cut`: a view, unless the dimension is several tensors."""
    shape, dim = whole.shape, cut.dim
    parts = whole.reshape(*shape[:dim], cut.outer, cut.parts, -1, *shape[dim + 1 :]).select(dim + 1, position)
    return parts.flatten(dim, dim + 1)


def joined(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """The whole tensor, from its parts in the order of ranks."""
    shape, dim = parts[0].shape, cut.dim
    outer = [part.reshape(*shape[:dim], cut.outer, -1, *shape[dim + 1 :]) for part in parts]
    return torch.stack(outer, dim + 1).flatten(dim, dim + 2)


def part_of(whole: Tensor, cuts: Sequence[Cut], at: Mapping[str, int]) -> Tensor:
    """The part that a rank with the coordinates `at` holds of a tensor."""
    for cut in cuts:
        whole = part(whole, cut, at[cut.axis])
    return whole
