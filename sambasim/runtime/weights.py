"""Weights in and out, under the names of the user's `state_dict`."""

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sambasim.errors import OptionError, WeightsError
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.runtime.device import DeviceMemory

_SAVED = (SymbolKind.PARAMETER, SymbolKind.BUFFER)


def save_weights(path: Path, program: Program, memory: DeviceMemory) -> None:
    """Write parameters and buffers so that the user's module takes them by `load_state_dict`, tied names included.

    The file appears whole or not at all. Raises OptionError if it cannot be written.
    """
    tensors = {
        torch_name: memory.tensor(symbol.name).clone()
        for symbol in program.symbols.values()
        if symbol.kind in _SAVED
        for torch_name in symbol.torch_names
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise OptionError(
            f"the weights cannot be saved as {path}: {error}", remedy="--save FILE.safetensors"
        ) from error


def load_weights(path: Path, program: Program) -> Mapping[str, Tensor]:
    """The tensors of a file of weights, by symbol: all parameters and buffers of `program`, and no others.

    Raises WeightsError, naming what is missing, left over or of another type.
    """
    try:
        tensors = load_file(path)
    except FileNotFoundError as error:
        raise WeightsError(
            f"there is no weights file {path}", remedy="--weights FILE.safetensors, made by --save"
        ) from error
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"{path} is no safetensors file: {error}", remedy="--weights takes what --save wrote"
        ) from error
    wanted = [symbol for symbol in program.symbols.values() if symbol.kind in _SAVED and symbol.torch_names]
    names = {name for symbol in wanted for name in symbol.torch_names}
    missing = [symbol.torch_names[0] for symbol in wanted if symbol.torch_names[0] not in tensors]
    left_over = [name for name in tensors if name not in names]
    if missing or left_over:
        raise WeightsError(
            f"{path} does not fit the PEF {program.name}: missing {_few(missing)}; not in the model {_few(left_over)}",
            remedy="use the weights of a run of this model",
        )
    loaded = {symbol.name: tensors[symbol.torch_names[0]] for symbol in wanted}
    for symbol in wanted:
        given = loaded[symbol.name]
        dtype = str(given.dtype).removeprefix("torch.")
        if dtype != symbol.type.dtype or tuple(given.shape) != symbol.type.shape:
            raise WeightsError(
                f"{symbol.torch_names[0]} is {dtype}{list(given.shape)} in {path}, "
                f"but {symbol.type} in the PEF {program.name}",
                remedy="use the weights of a run of this model",
            )
    return loaded


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "") if names else "nothing"
