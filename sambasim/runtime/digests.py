"""Digests of what was trained, so that two runs can be compared by 64 letters each."""

import hashlib
from collections.abc import Iterable

import torch

from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.runtime.device import DeviceMemory

_WEIGHTS = (SymbolKind.PARAMETER,)
_STATE = (SymbolKind.PARAMETER, SymbolKind.BUFFER, SymbolKind.OPTIMIZER_STATE)


def weights_sha256(program: Program, memory: DeviceMemory) -> str:
    """Over the parameters in name order, little-endian."""
    return _digest(program, memory, _WEIGHTS).hexdigest()


def state_sha256(program: Program, memory: DeviceMemory, steps: int) -> str:
    """Over parameters, buffers and optimizer state in name order, and the number of optimizer steps."""
    digest = _digest(program, memory, _STATE)
    digest.update(steps.to_bytes(8, "little"))
    return digest.hexdigest()


def _digest(program: Program, memory: DeviceMemory, kinds: Iterable[SymbolKind]) -> "hashlib._Hash":
    digest = hashlib.sha256()
    wanted = set(kinds)
    for name in sorted(name for name, symbol in program.symbols.items() if symbol.kind in wanted):
        tensor = memory.tensor(name)
        if tensor.numel():  # all machines that run torch are little-endian
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest
