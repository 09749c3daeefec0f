"""The safetensors layout of a program's weights, worked out from its symbols alone. No torch, no file.

One program has one layout, so a reader need not trust the header of a file: it compares it with the one that must be
there.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

from sambasim.ir.types import DTYPE_BYTES, Symbol, SymbolKind, align
from sambasim.pef.canonical import canonical_json
from sambasim.pef.rules import HEADER, LAYOUT, TENSORS, TYPES, Rule

WEIGHT_KINDS = frozenset({SymbolKind.PARAMETER, SymbolKind.BUFFER, SymbolKind.CONSTANT})
"""The kinds of symbol that have a tensor in the file."""

WEIGHTS_ALIGNMENT_BYTES = 64
"""The tensor data begins at a multiple of this in the file: a cache line, so that mapped tensors are aligned."""

LENGTH_BYTES = 8

SAFETENSORS_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """Where the tensor of `symbol` lies in the data: bytes `start` up to `stop`."""

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
    """The layout of the weights among `symbols`, whose dtypes are known."""
    return tensors_layout(symbol for symbol in symbols if symbol.kind in WEIGHT_KINDS)


def tensors_layout(symbols: Iterable[Symbol]) -> Layout:
    """The layout of one tensor for each of `symbols`, whose dtypes are known.

    The widest elements come first, then by name: data without gaps in which each tensor is aligned to its elements.
    """
    spans: list[Span] = []
    stop = 0
    for symbol in sorted(symbols, key=lambda symbol: (-DTYPE_BYTES[symbol.type.dtype], symbol.name)):
        start, stop = stop, stop + symbol.type.size_bytes
        spans.append(Span(symbol, start, stop))
    entries: dict[str, object] = {span.symbol.name: _entry(span) for span in spans}
    # Loaders of other houses look here to learn whose tensors these are.
    entries["__metadata__"] = {"format": "pt"}
    text = canonical_json(entries)
    length = align(LENGTH_BYTES + len(text), WEIGHTS_ALIGNMENT_BYTES) - LENGTH_BYTES
    return Layout(length.to_bytes(LENGTH_BYTES, "little") + text.ljust(length), tuple(spans), stop)


def _entry(span: Span) -> dict[str, object]:
    type_ = span.symbol.type
    return {
        "dtype": SAFETENSORS_DTYPES[type_.dtype],
        "shape": type_.shape,
        "data_offsets": [span.start, span.stop],
    }


def header_fault(found: bytes, layout: Layout) -> tuple[Rule, str] | None:
    """Why `found`, the first bytes of a member and as many as `layout.header` has, is not that header.

    Gives the broken rule and a sentence, or
    None if it is. Only equality is trusted; the rest of this function words the refusal.
    """
    if found == layout.header:
        return None
    if len(found) < len(layout.header):
        return HEADER, f"it ends inside its header, after {len(found)} bytes"
    if found[:LENGTH_BYTES] != layout.header[:LENGTH_BYTES]:
        length = int.from_bytes(found[:LENGTH_BYTES], "little")
        return HEADER, f"its header claims {length} bytes, and must have {len(layout.header) - LENGTH_BYTES}"
    try:
        entries = json.loads(found[LENGTH_BYTES:])
    except (ValueError, RecursionError):
        return HEADER, "its header is not JSON"
    if not isinstance(entries, dict):
        return HEADER, "its header is not a JSON object"
    return _entries_fault(entries, layout) or (HEADER, "its header is not canonical JSON padded with spaces")


def _entries_fault(entries: dict[str, object], layout: Layout) -> tuple[Rule, str] | None:
    expected = {span.symbol.name: span for span in layout.spans}
    missing = sorted(set(expected) - set(entries))
    unknown = sorted(set(entries) - set(expected) - {"__metadata__"})
    if missing or unknown:
        words = [f"it has no tensor {missing[0]}"] if missing else []
        words += [f"its tensor {unknown[0]!r} belongs to no symbol"] if unknown else []
        return TENSORS, " and ".join(words)
    for name, span in expected.items():
        entry, right = entries[name], _entry(span)
        if not isinstance(entry, dict):
            return HEADER, f"its entry {name} is not a JSON object"
        if entry.get("dtype") != right["dtype"] or entry.get("shape") != list(span.symbol.type.shape):
            return TYPES, f"its tensor {name} is not {span.symbol.type}, as the symbol is"
        if entry.get("data_offsets") != right["data_offsets"]:
            return LAYOUT, f"its tensor {name} must lie at bytes {span.start} to {span.stop} of the data"
    return None
