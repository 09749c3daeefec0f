"""The device memory of one replica: symbols at the byte offsets that the PEF gives them, in private or shared memory.
Activations are torch allocations instead, freed at their last use."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sambasim.errors import InternalError, MachineError
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.types import DTYPE_BYTES, Slice, SymbolKind, TensorType
from sambasim.runtime.machine.huge_pages import freeing, private_pages
from sambasim.units import format_bytes

Storage = NDArray[np.uint8]


def private_storage(size_bytes: int) -> Storage:
    """Zeroed private memory, page-aligned, in huge pages if possible. Raises MachineError if there is too little."""
    try:
        pages = private_pages(size_bytes)
    except (OSError, OverflowError) as error:
        what = f"the machine does not give {format_bytes(size_bytes)} of memory for a device: {error}"
        raise MachineError(what, remedy="raise `ulimit -v`, or compile a smaller model or batch") from error
    return np.frombuffer(pages, dtype=np.uint8)[:size_bytes]


SHARED_KINDS = (SymbolKind.PARAMETER, SymbolKind.CONSTANT)


def byte_array(tensor: Tensor) -> NDArray[np.uint8]:
    """The elements in the order of rows: a view, or a copy of a tensor that is not contiguous."""
    array: NDArray[np.uint8] = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()
    return array


class DeviceMemory:
    """Typed views of the device memory of one rank, whose program is `program`; none copies. `shared`, if given, holds
    parameters and constants at the same offsets: the storage of another replica of the node."""

    def __init__(self, program: Program, storage: Storage, shared: Storage | None = None) -> None:
        self.program = program
        self._bytes = torch.from_numpy(storage)
        self._shared = self._bytes if shared is None else torch.from_numpy(shared)
        self._views: dict[str, Tensor] = {}

    def tensor(self, symbol_name: str) -> Tensor:
        view = self._views.get(symbol_name)
        if view is None:
            symbol = self.program.symbols[symbol_name]
            if symbol.offset is None:
                raise InternalError(f"{symbol_name} is not kept in device memory")
            place = self._shared if symbol.kind in SHARED_KINDS else self._bytes
            view = self._views[symbol_name] = _view(place, symbol.offset, symbol.type)
        return view

    def region(self, group: ParameterGroup, region: str) -> Tensor:
        """A flat tensor of `group`, in place. `region`: "parameter", "gradient" or a state of its optimizer."""
        place = self._shared if region == "parameter" else self._bytes
        return _view(place, group.regions[region], group.region_type(region))

    def releasing(self, group: ParameterGroup, region: str, keep: Slice) -> Callable[[], None]:
        """A function that frees the memory of `region` outside the slice `keep`; it is zeros when used again."""
        flat, (start, stop) = self.region(group, region), keep
        return freeing([byte_array(flat[:start]), byte_array(flat[stop:])])

    @property
    def has_own_parameters(self) -> bool:
        return self._shared.data_ptr() == self._bytes.data_ptr()

    def with_parameters_of(self, other: "DeviceMemory") -> "DeviceMemory":
        """The same memory, with the parameters and constants of `other`."""
        return DeviceMemory(self.program, self._bytes.numpy(), other._shared.numpy())

    @cached_property
    def reduce_buffer(self) -> Tensor:
        """The reduce operand buffer as bytes. Raises InternalError without data parallelism."""
        name = self.program.reduce_buffer
        if name is None:
            raise InternalError("a program without data parallelism has no reduce buffer")
        return self.tensor(name).view(torch.uint8)


def _view(place: Tensor, offset: int, type_: TensorType) -> Tensor:
    stop = offset + type_.numel * DTYPE_BYTES[type_.dtype]
    flat: Tensor = place[offset:stop].view(getattr(torch, type_.dtype))
    return flat.view(type_.shape)
