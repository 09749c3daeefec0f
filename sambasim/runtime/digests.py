"""Digests of what was trained, so that two runs can be compared by 64 letters each."""

import hashlib
from collections.abc import Callable, Iterable

from torch import Tensor

from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.pef.weights import bytes_of
from sambasim.runtime.device import DeviceMemory

_WEIGHTS = (SymbolKind.PARAMETER,)
_STATE = (SymbolKind.PARAMETER, SymbolKind.BUFFER, SymbolKind.OPTIMIZER_STATE)


def weights_sha256(program: Program, memory: DeviceMemory) -> str:
    """Over the parameters in name order, little-endian."""
    return _digest(program, _WEIGHTS, memory.tensor).hexdigest()


def state_sha256(program: Program, tensor_of: Callable[[str], Tensor], steps: int) -> str:
    """Over parameters, buffers and optimizer state in name order, and the number of optimizer steps.

    `tensor_of` gives the tensor of a symbol; it is called once for each, in that order, and read before the next call.
    """
    digest = _digest(program, _STATE, tensor_of)
    digest.update(steps.to_bytes(8, "little"))
    return digest.hexdigest()


def tensor_sha256(tensor: Tensor) -> str:
    """Over the elements, little-endian, in the order of rows."""
    return hashlib.sha256(bytes_of(tensor)).hexdigest()


def _digest(program: Program, kinds: Iterable[SymbolKind], tensor_of: Callable[[str], Tensor]) -> "hashlib._Hash":
    digest = hashlib.sha256()
    wanted = set(kinds)
    for name in sorted(name for name, symbol in program.symbols.items() if symbol.kind in wanted):
        digest.update(bytes_of(tensor_of(name)))
    return digest
