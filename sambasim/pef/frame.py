"""Reading the framing of a PEF: rules 1 to 9, checked before anything is allocated or parsed.

`archive` says what the framing must be. Here the directory is read with suspicion, each trick that zips are known for
has a refusal of its own, and last of all the framing is compared with the only one that fits.
"""

import os
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sambasim.pef.archive import (
    CENTRAL,
    CENTRAL_MARK,
    END,
    END_64,
    END_64_MARK,
    END_MARK,
    EXTRA_64,
    LIMIT_16,
    LIMIT_32,
    LOCAL_MARK,
    LOCATOR_64,
    LOCATOR_64_MARK,
    NAMES,
    SIZES_64,
    Frame,
    Member,
    manifest_local_header,
    trailer,
    weights_local_header,
)
from sambasim.pef.rules import (
    ARCHIVE,
    BOUNDED,
    CHECKSUM,
    CONTIGUOUS,
    FRAMING,
    MANIFEST_MEMBER,
    MEMBERS,
    PLAIN,
    READABLE,
    STORED,
    refusal,
)
from sambasim.units import MIB, format_bytes

LARGEST_MANIFEST_BYTES = 256 * MIB
"""GPT-2 small takes about one MiB."""

_ENCRYPTED = 0x0041  # bits 0 and 6: encrypted, strongly encrypted
_LARGEST_DIRECTORY_BYTES = 2 * (CENTRAL.size + 3 * LIMIT_16)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One entry of the central directory, as the file claims it."""

    name: bytes
    flags: int
    method: int
    crc32: int
    compressed_bytes: int
    size_bytes: int
    offset: int


@contextmanager
def open_pef(path: Path) -> Iterator[tuple[BinaryIO, Frame]]:
    """Opens the PEF at `path` for reading and checks its framing. Raises PefError."""
    try:
        # Looked at before it is opened: opening a pipe would wait for a writer for ever.
        if not stat.S_ISREG(path.stat().st_mode):
            raise refusal(path, READABLE, "it is not a regular file", remedy="name a .pef file")
        file = path.open("rb")
    except OSError as error:
        what = f"it cannot be read: {error.strerror or type(error).__name__}"
        raise refusal(path, READABLE, what, remedy="check the path and its permissions") from error
    with file:
        try:
            yield file, _read_frame(file, path)
        except OSError as error:
            what = f"reading it failed: {error.strerror or type(error).__name__}"
            raise refusal(path, READABLE, what, remedy="check the disk") from error


def read_manifest(file: BinaryIO, frame: Frame, path: Path) -> bytes:
    """The bytes of pef.json. Raises PefError if they are not those that the directory's checksum is of."""
    data = _read(file, frame.manifest_offset, frame.manifest.size_bytes)
    if zlib.crc32(data) != frame.manifest.crc32:
        raise refusal(path, CHECKSUM, "its bytes do not have the checksum of the archive", part=MANIFEST_MEMBER)
    return data


def _read(file: BinaryIO, offset: int, size_bytes: int) -> bytes:
    file.seek(offset)
    return file.read(size_bytes)


def _read_frame(file: BinaryIO, path: Path) -> Frame:
    file_bytes = os.fstat(file.fileno()).st_size
    begin, size, count = _find_directory(file, file_bytes, path)
    if count != len(NAMES):
        raise refusal(path, MEMBERS, f"it has {count} members; a PEF has pef.json and weights.safetensors")
    if size > _LARGEST_DIRECTORY_BYTES or begin + size > file_bytes:
        raise refusal(path, CONTIGUOUS, f"its directory claims bytes {begin} to {begin + size} of {file_bytes}")
    manifest, weights = _parse_directory(_read(file, begin, size), path)
    _check_entries(manifest, weights, path)
    frame = Frame(Member(manifest.size_bytes, manifest.crc32), Member(weights.size_bytes, weights.crc32))
    _check_places(frame, manifest, weights, (begin, file_bytes), path)
    _compare(file, frame, path)
    return frame


def _find_directory(file: BinaryIO, file_bytes: int, path: Path) -> tuple[int, int, int]:
    """Where the central directory begins, its size in bytes, and the number of its entries."""
    head = _read(file, 0, len(LOCAL_MARK))
    if head != LOCAL_MARK:
        begins = f"it begins with {head!r}" if head else "it is empty"
        raise refusal(path, ARCHIVE, f"{begins}, so it is no PEF", remedy="name a file that sambasim compile wrote")
    end_offset = file_bytes - END.size
    end = _read(file, end_offset, END.size) if end_offset > 0 else b""
    if end[: len(END_MARK)] != END_MARK:
        what = "it does not end as a zip does: it was cut short, or something was added to it"
        raise refusal(path, ARCHIVE, what, remedy="copy it again, or compile the model again: sambasim compile")
    _, _, _, _, count, size, begin, _ = END.unpack(end)
    if begin != LIMIT_32:
        return begin, size, count
    locator_offset = end_offset - LOCATOR_64.size
    end_64_offset = locator_offset - END_64.size
    records = _read(file, end_64_offset, END_64.size + LOCATOR_64.size) if end_64_offset > 0 else b""
    if records[:4] != END_64_MARK or records[END_64.size :][:4] != LOCATOR_64_MARK:
        raise refusal(path, ARCHIVE, "it says that it is a large zip, and has no zip64 end record")
    *_, count, size, begin = END_64.unpack_from(records)
    return begin, size, count


def _parse_directory(data: bytes, path: Path) -> tuple[_Entry, _Entry]:
    entries: list[_Entry] = []
    position = 0
    for _ in NAMES:
        if data[position : position + 4] != CENTRAL_MARK or len(data) - position < CENTRAL.size:
            raise refusal(path, ARCHIVE, "its central directory is damaged")
        fields = CENTRAL.unpack_from(data, position)
        flags, method = fields[3], fields[4]
        crc32, compressed, size = fields[7], fields[8], fields[9]
        name_bytes, extra_bytes, comment_bytes, offset = fields[10], fields[11], fields[12], fields[16]
        position += CENTRAL.size
        name = data[position : position + name_bytes]
        extra = data[position + name_bytes : position + name_bytes + extra_bytes]
        position += name_bytes + extra_bytes + comment_bytes
        if size == LIMIT_32 and len(extra) == SIZES_64.size and int.from_bytes(extra[:2], "little") == EXTRA_64:
            _, _, size, compressed = SIZES_64.unpack(extra)
        entries.append(_Entry(name, flags, method, crc32, compressed, size, offset))
    return entries[0], entries[1]


def _check_entries(manifest: _Entry, weights: _Entry, path: Path) -> None:
    if manifest.name == weights.name:
        raise refusal(path, MEMBERS, f"both its members are called {_text(manifest.name)}")
    if (manifest.name, weights.name) != NAMES:
        found = f"{_text(manifest.name)} and {_text(weights.name)}"
        raise refusal(path, MEMBERS, f"its members are {found}; a PEF has pef.json and weights.safetensors")
    for entry in (manifest, weights):
        member = _text(entry.name)
        if entry.flags & _ENCRYPTED:
            raise refusal(path, PLAIN, f"{member} is encrypted", part=member)
        if entry.flags:
            what = f"{member} has the zip flags {entry.flags:#06x}, and must have none"
            raise refusal(path, PLAIN, what, part=member)
        if entry.method != 0:
            what = f"{member} is compressed (zip method {entry.method}); members are stored, so that they can be mapped"
            raise refusal(path, STORED, what, part=member)
        if entry.compressed_bytes != entry.size_bytes:
            what = f"{member} claims {entry.compressed_bytes} stored bytes for {entry.size_bytes}"
            raise refusal(path, STORED, what, part=member)
    if manifest.size_bytes > LARGEST_MANIFEST_BYTES:
        what = f"it claims {format_bytes(manifest.size_bytes)}; at most {format_bytes(LARGEST_MANIFEST_BYTES)} are read"
        raise refusal(path, BOUNDED, what)


def _check_places(frame: Frame, manifest: _Entry, weights: _Entry, ends: tuple[int, int], path: Path) -> None:
    directory_offset, file_bytes = ends
    expected = (
        (MANIFEST_MEMBER, manifest.offset, 0),
        (_text(weights.name), weights.offset, frame.weights_header_offset),
        ("the central directory", directory_offset, frame.directory_offset),
        ("the end of the file", file_bytes, frame.size_bytes),
    )
    for what, found, right in expected:
        if found != right:
            reason = "members neither overlap nor leave gaps"
            raise refusal(path, CONTIGUOUS, f"{what} is at byte {found}, and must be at {right}: {reason}", part=what)


def _compare(file: BinaryIO, frame: Frame, path: Path) -> None:
    pieces = (
        (0, manifest_local_header(frame), "the header of pef.json"),
        (frame.weights_header_offset, weights_local_header(frame), "the header of weights.safetensors"),
        (frame.directory_offset, trailer(frame), "the central directory"),
    )
    for offset, right, what in pieces:
        if _read(file, offset, len(right)) != right:
            raise refusal(path, FRAMING, f"{what} is not the one that belongs to these members", part=what)


def _text(name: bytes) -> str:
    """A member's name for a message; it may be hostile, so it is shortened and kept to printable ASCII."""
    return "".join(chr(byte) if 32 <= byte < 127 else "?" for byte in name[:64])
