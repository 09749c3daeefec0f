"""The tensors of weights.safetensors: streamed out one after another, and mapped back in without a copy.

torch is imported by the functions that need it, so that everything else about a PEF can be read without it.
"""

import mmap
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, BinaryIO

from sambasim.errors import InternalError, MachineError
from sambasim.ir.types import Symbol
from sambasim.pef.layout import Layout

if TYPE_CHECKING:
    import torch


def check_tensors(layout: Layout, tensors: "Mapping[str, torch.Tensor]") -> None:
    """Checks that there is one dense CPU tensor for each symbol of `layout`, of its type, and no other.

    Raises InternalError if not: the compiler made both.
    """
    import torch

    _require_little_endian()
    expected = {span.symbol.name: span.symbol for span in layout.spans}
    if missing := sorted(expected.keys() - tensors.keys()):
        raise InternalError(f"no tensor was given for {missing[0]}", where=f"one of {len(missing)} symbols without one")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise InternalError(f"the tensor {unknown[0]} belongs to no parameter, buffer or constant")
    for name, symbol in expected.items():
        tensor = tensors[name]
        fits = tensor.dtype is _dtype(symbol) and tuple(tensor.shape) == symbol.type.shape
        if not (fits and tensor.layout is torch.strided and tensor.device.type == "cpu"):
            found = f"{tensor.dtype}{list(tensor.shape)}, {tensor.layout}, on {tensor.device}"
            raise InternalError(f"{name} must be a dense {symbol.type} on the CPU, and is {found}")


def tensor_bytes(layout: Layout, tensors: "Mapping[str, torch.Tensor]") -> Iterator[memoryview]:
    """The bytes of each tensor, in the order of `layout`. Only non-contiguous tensors are copied, one at a time."""
    for span in layout.spans:
        yield bytes_of(tensors[span.symbol.name])


def bytes_of(tensor: "torch.Tensor") -> memoryview:
    """The elements, little-endian, in the order of rows: a view, or a copy of a tensor that is not contiguous."""
    import torch

    if not tensor.numel():
        return memoryview(b"")
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data  # all machines that run torch are little-endian


def map_tensors(file: BinaryIO, data_offset: int, layout: Layout) -> "dict[str, torch.Tensor]":
    """Tensors that are views of `file`, whose tensor data begins at `data_offset`, by symbol name.

    The mapping is copy-on-write: pages are read when they are touched, shared with other processes that map the same
    file, and what is written to a tensor never reaches the file.
    """
    import torch

    _require_little_endian()
    if layout.data_bytes:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        data = torch.frombuffer(mapped, dtype=torch.uint8, count=layout.data_bytes, offset=data_offset)
    else:
        data = torch.empty(0, dtype=torch.uint8)  # torch takes no view of nothing
    return {
        span.symbol.name: data[span.start : span.stop].view(_dtype(span.symbol)).view(span.symbol.type.shape)
        for span in layout.spans
    }


def _dtype(symbol: Symbol) -> "torch.dtype":
    import torch

    dtype = getattr(torch, symbol.type.dtype)
    if not isinstance(dtype, torch.dtype):
        raise InternalError(f"{symbol.type.dtype} is no dtype of torch")
    return dtype


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        what = "the numbers in a PEF are little-endian, and this machine's are not"
        raise MachineError(what, remedy="use an x86-64 or ARM machine")
