"""The file around the two members of a PEF: a zip archive of `weights.safetensors`, whose data is aligned to 64 bytes,
and `pef.json`; the rules 1 to 6 that a reader checks before it parses; the place of each tensor, its bytes, and mapping
without a copy. One program has one layout, so a reader compares a file's header with the only one that fits."""

import hashlib
import json
import mmap
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from sambasim.errors import InternalError, PefError, shortened
from sambasim.files import in_memory, regular
from sambasim.ir.types import DTYPE_BYTES, Symbol, SymbolKind, align
from sambasim.units import KIB, MIB, format_bytes

if TYPE_CHECKING:
    import torch

MANIFEST_MEMBER = "pef.json"
WEIGHTS_MEMBER = "weights.safetensors"
COMPILE_AGAIN = "compile the model again: sambasim compile"
NOT_OURS = "name a file that sambasim compile wrote"

LARGEST_MANIFEST_BYTES = 64 * MIB  # GPT-2 small takes about one MiB

ALIGNMENT_BYTES = 64
"""The tensor data begins at a multiple of this in the file: a cache line, so that mapped tensors are aligned."""

CHUNK_BYTES, _CACHED_BYTES = 4 * MIB, 256 * KIB

_ALIGNMENT_ID, _ALIGNMENT_FIELD = 0xD935, struct.Struct("<3H")
"""Android's zipalign field: its number, the bytes that follow, the alignment; then zeros as padding."""
_LOCAL = struct.Struct("<26x2H")
"""A local header, which ends with the lengths of the name and of the extra field that follow it."""
_LOCAL_MARK, _END_MARK, _END_BYTES = b"PK\3\4", b"PK\5\6", 22
_ZIP64_FIELD_BYTES = 20
_DAMAGED = (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, EOFError, OverflowError)
"""What zipfile raises for damaged bytes: NotImplementedError for an unknown compression or version, struct.error and
EOFError where it ends too early, ValueError and OverflowError for offsets and sizes outside of the file."""


class Rule(IntEnum):
    """The rules, by the numbers of README.md. Messages have the name in lower case."""

    READABLE = 1
    ARCHIVE = 2
    MEMBERS = 3
    PLACES = 4
    BOUNDED = 5
    CHECKSUM = 6
    FORMAT = 7
    VERSION = 8
    SCHEMA = 9
    PROGRAM = 10
    LAYOUT = 11
    CONTENT = 12

    @property
    def part(self) -> str:
        if self < Rule.BOUNDED:
            return "the file"
        return MANIFEST_MEMBER if self < Rule.LAYOUT else WEIGHTS_MEMBER


def refusal(path: Path, rule: Rule, what: str, *, remedy: str = COMPILE_AGAIN) -> PefError:
    what = f"{path.name} breaks rule {rule:d} of the PEF format ({rule.name.lower()}): {shortened(what)}"
    return PefError(what, where=f"{rule.part}, {path}", remedy=remedy)


@dataclass(frozen=True, slots=True)
class Archive:
    """An open PEF: the bytes of `pef.json`, and where `weights.safetensors` lies in `file`."""

    file: BinaryIO
    manifest: bytes
    weights_offset: int
    weights_bytes: int

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.manifest).hexdigest()

    def weights_sha256(self) -> str:
        """The SHA-256 of the member with the weights: reads all of it."""
        hashed, left, buffer = hashlib.sha256(), self.weights_bytes, memoryview(bytearray(_CACHED_BYTES))
        self.file.seek(self.weights_offset)
        while left and (size := self.file.readinto(buffer[:left])):  # type: ignore[attr-defined]  # of a raw file
            hashed.update(buffer[:size])
            left -= size
        return hashed.hexdigest()


@contextmanager
def open_pef(path: Path) -> Iterator[Archive]:
    """Opens the PEF at `path` and checks its rules 1 to 6. Raises PefError."""
    try:
        file = os.fdopen(regular(path, os.O_RDONLY), "rb")
    except OSError as error:
        what = f"it cannot be read: {error.strerror or type(error).__name__}"
        raise refusal(path, Rule.READABLE, what, remedy="check the path and its permissions") from error
    with file:
        try:
            with in_memory(path):
                yield _open_archive(file, path)
        except OSError as error:
            what = f"reading it failed: {error.strerror or type(error).__name__}"
            raise refusal(path, Rule.READABLE, what, remedy="check the disk") from error


def _open_archive(file: BinaryIO, path: Path) -> Archive:
    head = file.read(len(_LOCAL_MARK))
    if head != _LOCAL_MARK:
        begins = f"it begins with {head!r}" if head else "it is empty"
        raise refusal(path, Rule.ARCHIVE, f"{begins}, so it is no PEF", remedy=NOT_OURS)
    file.seek(max(file.seek(0, os.SEEK_END) - _END_BYTES, 0))
    tail = file.read()
    if tail[:4] != _END_MARK or tail[-2:] != b"\0\0":
        what = "it does not end as a zip does: it was cut short, or something was added to it"
        raise refusal(path, Rule.ARCHIVE, what, remedy=f"copy it again, or {COMPILE_AGAIN}")
    try:
        with zipfile.ZipFile(file) as archive:
            weights, manifest = _members(archive, path)
            file.seek(0)
            offset = _LOCAL.size + sum(_LOCAL.unpack(file.read(_LOCAL.size)))
            end = manifest.header_offset + _LOCAL.size + len(MANIFEST_MEMBER) + manifest.file_size
            follow = offset + weights.file_size == manifest.header_offset and end == archive.start_dir
            if weights.header_offset or offset % ALIGNMENT_BYTES or not follow:
                what = "its members and its directory do not follow one another, aligned, from the first byte on"
                raise refusal(path, Rule.PLACES, what)
            try:
                return Archive(file, archive.read(manifest), offset, weights.file_size)
            except _DAMAGED as error:
                raise refusal(path, Rule.CHECKSUM, f"it is damaged: {error}") from error
    except _DAMAGED as error:
        raise refusal(path, Rule.ARCHIVE, f"it is a damaged zip archive: {error}") from error


def _members(archive: zipfile.ZipFile, path: Path) -> tuple[zipfile.ZipInfo, zipfile.ZipInfo]:
    members = archive.infolist()
    if [member.filename for member in members] != [WEIGHTS_MEMBER, MANIFEST_MEMBER]:
        names = ", ".join(ascii(member.filename)[:40] for member in members[:4])
        what = f"it has {len(members)} members ({names}), and must have {WEIGHTS_MEMBER}, then {MANIFEST_MEMBER}"
        raise refusal(path, Rule.MEMBERS, what, remedy=NOT_OURS)
    for member in members:
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits or member.file_size != member.compress_size:
            what = f"{member.filename} is compressed or encrypted, and must be stored as it is"
            raise refusal(path, Rule.MEMBERS, what)
    if members[1].file_size > LARGEST_MANIFEST_BYTES:
        limit = format_bytes(LARGEST_MANIFEST_BYTES)
        raise refusal(path, Rule.BOUNDED, f"it has {format_bytes(members[1].file_size)}, and at most {limit} are read")
    return members[0], members[1]


def write_archive(
    file: BinaryIO, weights: Iterable[memoryview], weights_bytes: int, manifest: Callable[[str], bytes]
) -> tuple[str, str]:
    """Writes a PEF to an empty file; returns the SHA-256 of `pef.json`, made by `manifest`, and of the weights."""
    hashed = hashlib.sha256()
    entry = _entry(WEIGHTS_MEMBER)
    is_large = weights_bytes > zipfile.ZIP64_LIMIT
    begin = _LOCAL.size + len(WEIGHTS_MEMBER) + is_large * _ZIP64_FIELD_BYTES + _ALIGNMENT_FIELD.size
    padding = align(begin, ALIGNMENT_BYTES) - begin
    entry.extra = _ALIGNMENT_FIELD.pack(_ALIGNMENT_ID, 2 + padding, ALIGNMENT_BYTES) + bytes(padding)
    with zipfile.ZipFile(file, "w") as archive:
        # Hashing takes as long as writing and the checksum do, and none of them holds the GIL.
        with archive.open(entry, "w", force_zip64=is_large) as member, ThreadPoolExecutor(1) as other:
            for piece in weights:
                for start in range(0, len(piece), CHUNK_BYTES):
                    chunk = piece[start : start + CHUNK_BYTES]
                    hashing = other.submit(hashed.update, chunk)
                    member.write(chunk)
                    hashing.result()
        data = manifest(hashed.hexdigest())
        archive.writestr(_entry(MANIFEST_MEMBER), data)
    return hashlib.sha256(data).hexdigest(), hashed.hexdigest()


def replace_manifest(file: BinaryIO, data: bytes) -> str:
    """Replace `pef.json` of the PEF in `file` with `data`; returns its SHA-256. The weights stay where they are."""
    with zipfile.ZipFile(file, "a") as archive:
        last = archive.filelist.pop()
        del archive.NameToInfo[last.filename]
        archive.start_dir = last.header_offset  # where the next member begins
        archive.writestr(_entry(MANIFEST_MEMBER), data)
    return hashlib.sha256(data).hexdigest()


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name)  # of 1980-01-01
    entry.create_system = 3  # Unix
    entry.external_attr = 0o100644 << 16
    return entry


_LENGTH_BYTES = 8
_SAFETENSORS_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip


WEIGHTS = (SymbolKind.PARAMETER, SymbolKind.BUFFER, SymbolKind.CONSTANT)


@dataclass(frozen=True, slots=True)
class Layout:
    """`header`: the length and the JSON at the beginning; `places`: of whole tensors behind it, in bytes."""

    header: bytes
    places: tuple[tuple[Symbol, slice], ...]
    data_bytes: int

    @property
    def size_bytes(self) -> int:
        return len(self.header) + self.data_bytes


def weights_layout(symbols: Iterable[Symbol]) -> Layout:
    """The layout of the parameters, buffers and constants among `symbols`: the widest elements first, then by name."""
    places, stop = list[tuple[Symbol, slice]](), 0
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}  # tells other libraries whose tensors these are
    weights = [symbol for symbol in symbols if symbol.kind in WEIGHTS]
    for symbol in sorted(weights, key=lambda symbol: (-DTYPE_BYTES[symbol.type.dtype], symbol.name)):
        start, stop = stop, stop + symbol.whole.size_bytes
        places.append((symbol, slice(start, stop)))
        dtype = _SAFETENSORS_DTYPES[symbol.type.dtype]
        entries[symbol.name] = {"dtype": dtype, "shape": symbol.whole.shape, "data_offsets": [start, stop]}
    text = json.dumps(entries, separators=(",", ":"), sort_keys=True, ensure_ascii=False).encode()
    length = align(_LENGTH_BYTES + len(text), ALIGNMENT_BYTES) - _LENGTH_BYTES
    return Layout(length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length), tuple(places), stop)


def check_tensors(layout: Layout, tensors: "Mapping[str, torch.Tensor]") -> None:
    """Raises InternalError unless there is one dense CPU tensor for each symbol of `layout`, of its type."""
    import torch

    if unequal := {symbol.name for symbol, _ in layout.places} ^ tensors.keys():
        raise InternalError(f"{min(unequal)} has no tensor, or is no parameter, buffer or constant of the program")
    for symbol, _ in layout.places:
        tensor = tensors[symbol.name]
        fits = tensor.dtype is getattr(torch, symbol.type.dtype) and tuple(tensor.shape) == symbol.whole.shape
        if not (fits and tensor.layout is torch.strided and tensor.device.type == "cpu"):
            found = f"{tensor.dtype}{list(tensor.shape)}, {tensor.layout}, on {tensor.device}"
            raise InternalError(f"{symbol.name} must be a dense {symbol.whole} on the CPU, and is {found}")


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
        symbol.name: data[place].view(getattr(torch, symbol.type.dtype)).view(symbol.whole.shape)
        for symbol, place in layout.places
    }
