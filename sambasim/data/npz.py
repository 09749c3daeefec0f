"""`.npz` files, from whoever wrote them: what they claim is compared with what they hold before it is allocated."""

import os
import zipfile
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from sambasim.units import format_bytes

_SUFFIX = ".npy"
_PIECE_BYTES = 1 << 20
_PLAIN = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what numpy.savez and numpy.savez_compressed write


def array_names(path: Path) -> tuple[str, ...]:
    """The arrays of the file at `path`, in order. Raises ValueError, or what zipfile raises, for no sound archive."""
    with zipfile.ZipFile(path) as archive:
        return tuple(_members(archive, path))


def read_arrays(path: Path, names: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    """The arrays called `names`, one after another.

    Raises ValueError for one that is not what its header says, or that the machine has no memory for, and what zipfile
    and torch raise.
    """
    with zipfile.ZipFile(path) as archive:
        members = _members(archive, path)
        wanted, there = sum(members[name].file_size for name in names), _memory_bytes()
        if wanted > there:
            raise ValueError(f"its arrays take {format_bytes(wanted)}, and the machine has {format_bytes(there)}")
        for name in names:
            with archive.open(members[name]) as file:
                yield name, torch.from_numpy(_read(file, name, members[name].file_size))


def _members(archive: zipfile.ZipFile, path: Path) -> Mapping[str, zipfile.ZipInfo]:
    found: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(_SUFFIX)
        if name in found:
            raise ValueError(f"the array {name[:80]!r} is there twice")
        if member.compress_type not in _PLAIN or member.flag_bits & 0x1:
            raise ValueError(f"the array {name[:80]!r} is encrypted, or compressed in a way that numpy does not write")
        found[name] = member
    stored = sum(member.compress_size for member in found.values())
    if stored > path.stat().st_size:
        raise ValueError("its members overlap")
    return found


def _read(file: IO[bytes], name: str, member_bytes: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"the array {name[:80]!r} has a header of version {version[0]}.{version[1]}")
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, by_columns, dtype = read_header(file)
    if dtype.hasobject:
        raise ValueError(f"Object arrays cannot be loaded: {name[:80]!r} holds Python's own, which may be code")
    claimed, held = prod(shape) * dtype.itemsize, member_bytes - file.tell()
    if claimed != held or min(shape, default=0) < 0:
        raise ValueError(f"the array {name[:80]!r} claims {claimed} bytes, and has {held}")
    data = bytearray(claimed)
    view, filled = memoryview(data), 0
    while filled < claimed:
        piece = file.read(min(claimed - filled, _PIECE_BYTES))
        count = len(piece)
        view[filled : filled + count] = piece
        if not count:
            raise ValueError(f"the array {name[:80]!r} ends after {filled} of {claimed} bytes")
        filled += count
    file.read(1)  # at the end, zipfile compares the checksum
    return np.frombuffer(data, dtype=dtype).reshape(shape, order="F" if by_columns else "C")


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
