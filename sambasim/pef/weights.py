"""The member `weights.safetensors`: the place of each tensor, its bytes, and mapping without a copy. One program has
one layout, so a reader compares a file's header with the only one that fits. torch is imported late."""

import json
import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from sambasim.errors import InternalError
from sambasim.ir.types import DTYPE_BYTES, Symbol, SymbolKind, align
from sambasim.pef.archive import ALIGNMENT_BYTES

if TYPE_CHECKING:
    import torch

WEIGHT_KINDS = frozenset({SymbolKind.PARAMETER, SymbolKind.BUFFER, SymbolKind.CONSTANT})

_LENGTH_BYTES = 8
_SAFETENSORS_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """Where the whole tensor of `symbol` lies in the data: bytes `start` up to `stop`."""

    symbol: Symbol
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Layout:
    """`header` is the length and the JSON with which the member begins; `spans` cover the data that follows it."""

    header: bytes
    spans: tuple[Span, ...]
    data_bytes: int

    @property
    def size_bytes(self) -> int:
        return len(self.header) + self.data_bytes


def weights_layout(symbols: Iterable[Symbol]) -> Layout:
    """The layout of the parameters, buffers and constants among `symbols`: the widest elements first, then by name."""
    spans: list[Span] = []
    stop = 0
    weights = [symbol for symbol in symbols if symbol.kind in WEIGHT_KINDS]
    for symbol in sorted(weights, key=lambda symbol: (-DTYPE_BYTES[symbol.type.dtype], symbol.name)):
        start, stop = stop, stop + symbol.whole.size_bytes
        spans.append(Span(symbol, start, stop))
    entries: dict[str, object] = {
        span.symbol.name: {
            "dtype": _SAFETENSORS_DTYPES[span.symbol.type.dtype],
            "shape": span.symbol.whole.shape,
            "data_offsets": [span.start, span.stop],
        }
        for span in spans
    }
    entries["__metadata__"] = {"format": "pt"}  # other libraries learn here whose tensors these are
    text = json.dumps(entries, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()
    length = align(_LENGTH_BYTES + len(text), ALIGNMENT_BYTES) - _LENGTH_BYTES
    return Layout(length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length), tuple(spans), stop)


def check_tensors(layout: Layout, tensors: "Mapping[str, torch.Tensor]") -> None:
    """Raises InternalError unless there is one dense CPU tensor for each symbol of `layout`, of its type."""
    import torch

    if unequal := {span.symbol.name for span in layout.spans} ^ tensors.keys():
        raise InternalError(f"{min(unequal)} has no tensor, or is no parameter, buffer or constant of the program")
    for symbol in (span.symbol for span in layout.spans):
        tensor = tensors[symbol.name]
        fits = tensor.dtype is _dtype(symbol) and tuple(tensor.shape) == symbol.whole.shape
        if not (fits and tensor.layout is torch.strided and tensor.device.type == "cpu"):
            found = f"{tensor.dtype}{list(tensor.shape)}, {tensor.layout}, on {tensor.device}"
            raise InternalError(f"{symbol.name} must be a dense {symbol.whole} on the CPU, and is {found}")


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
    """Tensors that are copy-on-write views of `file`, whose tensor data begins at `data_offset`, by symbol name."""
    import torch

    if layout.data_bytes:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        data = torch.frombuffer(mapped, dtype=torch.uint8, count=layout.data_bytes, offset=data_offset)
    else:
        data = torch.empty(0, dtype=torch.uint8)  # torch takes no view of nothing
    return {
        span.symbol.name: data[span.start : span.stop].view(_dtype(span.symbol)).view(span.symbol.whole.shape)
        for span in layout.spans
    }


def _dtype(symbol: Symbol) -> "torch.dtype":
    import torch

    dtype: torch.dtype = getattr(torch, symbol.type.dtype)
    return dtype
