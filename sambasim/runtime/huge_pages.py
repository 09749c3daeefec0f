"""Memory in huge pages: fewer places to look up, and longer ways to read ahead.

A processor looks up where each page of memory lies, and fetches ahead no further than the page's end. From pages of
2 MiB, a core reads and copies memory faster than from pages of 4 KiB, by a third and more on a virtual machine, where
each lookup is two.

Of private memory, the system only needs to be told. Of a window that ranks share it takes two steps, because an MPI
puts it at any address: its memory is mapped once more, at an address where huge pages can lie, and each rank has the
system gather the small pages of its part into huge ones (Linux 6.1). What a system cannot do is left undone: the memory
is as good, and slower. Where a process may only have so much address space (`ulimit -v`), none is spent on this.
"""

import ctypes
import mmap
import resource
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from sambasim.runtime.ranks import ByteArray, Range

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MAPS = Path("/proc/self/maps")
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2  # of mremap(2)
_MADV_COLLAPSE = 25  # of madvise(2)
_FAILED = ctypes.c_void_p(-1).value
_FEWEST = 2
"""Huge pages in a part of a window: of fewer, none may lie whole within it."""


def private_pages(size_bytes: int) -> mmap.mmap:
    """Zeroed memory of this process alone, in huge pages where there are. Raises OSError or OverflowError if the system
    does not give so much.

    Processes that are forked from this one, as those that read data are, do not have it: else each page that is written
    afterwards would be copied for them.
    """
    pages = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with suppress(OSError, AttributeError):  # not every system knows every one
            pages.madvise(getattr(mmap, advice))
    return pages


@dataclass(frozen=True, slots=True)
class Again:
    """Memory that is mapped a second time, as `view`. `release` takes that mapping away."""

    view: ByteArray
    _reserved: int
    _reserved_bytes: int

    def gather(self, ranges: Iterable[Range]) -> int:
        """Gather the small pages of what lies in `ranges` of the view into huge ones; what is in them stays. Bytes that
        were asked for: huge pages that lie wholly in a range. All of them will be there, so they should be used."""
        huge, asked = huge_bytes(), 0
        for start, stop in merged(ranges):
            first = self.view.ctypes.data + start
            skipped = -first % huge
            length = (stop - start - skipped) // huge * huge
            if length <= 0:
                continue
            begins = self.view[start + skipped :][:length:huge]
            begins.max()  # to read is enough: where no small page is, none can be gathered
            _library().madvise(first + skipped, length, _MADV_COLLAPSE)
            asked += length
        return asked

    def release(self) -> None:
        """The view must not be used any more."""
        _library().munmap(self._reserved, self._reserved_bytes)


def mapped_again(part: ByteArray) -> Again | None:
    """`part`, which is shared memory and starts on a page, at an address where huge pages can lie. None where there are
    no huge pages, or the part is too small for them, or cannot be mapped."""
    huge = huge_bytes()
    if not huge or part.nbytes < _FEWEST * huge or resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return None
    try:
        offset = _offset_in_file(part, _MAPS.read_text(encoding="utf-8", errors="surrogateescape"))
        library = _library()
    except (OSError, AttributeError):
        return None
    if offset is None:
        return None
    whole = -(-part.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    reserved_bytes = whole + huge
    nobody = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved = library.mmap(None, reserved_bytes, 0, nobody, -1, 0)
    if reserved == _FAILED:
        return None
    # An address and the place in the file must be equally far behind a huge page's beginning.
    address = reserved + (offset - reserved) % huge
    # Of no old bytes, shared memory is mapped a second time, and stays where it is too.
    if library.mremap(part.ctypes.data, 0, whole, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) == _FAILED:
        return None  # what was reserved is an address only, and who knows what lies there now
    view = np.ctypeslib.as_array((ctypes.c_uint8 * part.nbytes).from_address(address))
    return Again(view, reserved, reserved_bytes)


@cache
def huge_bytes() -> int:
    """The bytes of a huge page; 0 where there are none."""
    try:
        return int(_SIZE.read_text())
    except (OSError, ValueError):
        return 0


def merged(ranges: Iterable[Range]) -> Sequence[Range]:
    """The same bytes, each once, in as few ranges as can be."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        elif stop > start:
            found.append((start, stop))
    return found


def _offset_in_file(part: ByteArray, maps: str) -> int | None:
    """Where `part`, if it is shared memory and of one mapping, is in its file, by the text of a /proc/PID/maps file."""
    address = part.ctypes.data
    for line in maps.splitlines():
        bounds, permissions, offset, *_ = line.split(maxsplit=4)
        low, high = (int(bound, 16) for bound in bounds.split("-"))
        if low <= address < high:
            is_whole = permissions.endswith("s") and address + part.nbytes <= high
            return int(offset, 16) + address - low if is_whole else None
    return None


@cache
def _library() -> ctypes.CDLL:
    """The C library, of which Python's mmap knows too little. Raises AttributeError where it has no such functions."""
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.restype = library.mremap.restype = address
    library.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    library.mremap.argtypes = [address, size, size, number, address]
    library.munmap.argtypes = [address, size]
    library.madvise.argtypes = [address, size, number]
    return library
