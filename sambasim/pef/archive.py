"""The zip around the two members: one framing for given sizes and checksums, byte for byte.

    0            local header and name of pef.json
    38           pef.json
    …            local header, name and extra field of weights.safetensors; the extra field pads
    64 * n       weights.safetensors
    …            central directory, two entries
    …            zip64 end record and its locator, only where the directory begins at 4 GiB or later
    size - 22    end record

Because nothing in it is a choice, a reader takes sizes and checksums from the directory, works out what the framing
must be, and compares: overlapping members, hidden bytes and headers that contradict each other cannot survive that.
Source: PKWARE, APPNOTE.TXT 6.3.10, sections 4.3 and 4.5.
"""

import struct
from dataclasses import dataclass

from sambasim.ir.types import align
from sambasim.pef.layout import WEIGHTS_ALIGNMENT_BYTES
from sambasim.pef.rules import MANIFEST_MEMBER, WEIGHTS_MEMBER

NAMES = (MANIFEST_MEMBER.encode(), WEIGHTS_MEMBER.encode())

LOCAL = struct.Struct("<4s5H3I2H")
CENTRAL = struct.Struct("<4s6H3I5H2I")
END = struct.Struct("<4s4H2IH")
END_64 = struct.Struct("<4sQ2H2I4Q")
LOCATOR_64 = struct.Struct("<4sIQI")
SIZES_64 = struct.Struct("<2H2Q")

LOCAL_MARK, CENTRAL_MARK, END_MARK = b"PK\3\4", b"PK\1\2", b"PK\5\6"
END_64_MARK, LOCATOR_64_MARK = b"PK\6\6", b"PK\6\7"

LIMIT_16 = (1 << 16) - 1
LIMIT_32 = (1 << 32) - 1
"""A 32-bit field that holds this says: look in the zip64 field instead."""

VERSION_STORED, VERSION_64 = 20, 45
MADE_ON_UNIX = 3 << 8
MIDNIGHT, NEW_YEAR_1980 = 0, 0x0021
PLAIN_FILE = 0o100644 << 16
EXTRA_64 = 0x0001
EXTRA_ALIGNMENT = 0xD935
"""Android's zipalign field: the alignment in bytes, then zeros as padding."""


@dataclass(frozen=True, slots=True)
class Member:
    """Size and CRC-32 of one member's data."""

    size_bytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Frame:
    """The two members, in the order of the file; everything else follows from them."""

    manifest: Member
    weights: Member

    @property
    def manifest_offset(self) -> int:
        return LOCAL.size + len(NAMES[0])

    @property
    def weights_header_offset(self) -> int:
        return self.manifest_offset + self.manifest.size_bytes

    @property
    def weights_offset(self) -> int:
        """Where the member begins. Its safetensors header is a multiple of 64 bytes long: its data is aligned too."""
        return self.weights_header_offset + len(weights_local_header(self))

    @property
    def directory_offset(self) -> int:
        return self.weights_offset + self.weights.size_bytes

    @property
    def size_bytes(self) -> int:
        return self.directory_offset + len(trailer(self))


def manifest_local_header(frame: Frame) -> bytes:
    """What stands before pef.json."""
    return _local_header(NAMES[0], frame.manifest, b"")


def weights_local_header(frame: Frame) -> bytes:
    """What stands before weights.safetensors, padded so that the member is aligned."""
    sizes = b""
    if _is_large(frame.weights):
        sizes = SIZES_64.pack(EXTRA_64, 16, frame.weights.size_bytes, frame.weights.size_bytes)
    begin = frame.weights_header_offset + LOCAL.size + len(NAMES[1]) + len(sizes)
    # Six bytes is the least that the alignment field takes: its number, its length, the alignment.
    padding = align(begin + 6, WEIGHTS_ALIGNMENT_BYTES) - begin - 4
    alignment = struct.pack("<3H", EXTRA_ALIGNMENT, padding, WEIGHTS_ALIGNMENT_BYTES).ljust(4 + padding, b"\0")
    return _local_header(NAMES[1], frame.weights, sizes + alignment)


def trailer(frame: Frame) -> bytes:
    """What stands after the members: the central directory and the end records."""
    directory = _central_header(NAMES[0], frame.manifest, 0)
    directory += _central_header(NAMES[1], frame.weights, frame.weights_header_offset)
    begin, size = frame.directory_offset, len(directory)
    if begin < LIMIT_32:
        return directory + END.pack(END_MARK, 0, 0, 2, 2, size, begin, 0)
    version = MADE_ON_UNIX | VERSION_64
    end_64 = END_64.pack(END_64_MARK, END_64.size - 12, version, VERSION_64, 0, 0, 2, 2, size, begin)
    locator = LOCATOR_64.pack(LOCATOR_64_MARK, 0, begin + size, 1)
    return directory + end_64 + locator + END.pack(END_MARK, 0, 0, 2, 2, size, LIMIT_32, 0)


def _is_large(member: Member) -> bool:
    return member.size_bytes >= LIMIT_32


def _version(member: Member) -> int:
    return VERSION_64 if _is_large(member) else VERSION_STORED


def _local_header(name: bytes, member: Member, extra: bytes) -> bytes:
    size = min(member.size_bytes, LIMIT_32)
    fields = (_version(member), 0, 0, MIDNIGHT, NEW_YEAR_1980, member.crc32, size, size, len(name), len(extra))
    return LOCAL.pack(LOCAL_MARK, *fields) + name + extra


def _central_header(name: bytes, member: Member, offset: int) -> bytes:
    version = _version(member)
    size = min(member.size_bytes, LIMIT_32)
    extra = b""
    if _is_large(member):
        extra = SIZES_64.pack(EXTRA_64, 16, member.size_bytes, member.size_bytes)
    head = (MADE_ON_UNIX | version, version, 0, 0, MIDNIGHT, NEW_YEAR_1980, member.crc32, size, size)
    tail = (len(name), len(extra), 0, 0, 0, PLAIN_FILE, offset)
    return CENTRAL.pack(CENTRAL_MARK, *head, *tail) + name + extra
