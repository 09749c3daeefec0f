"""Memory in huge pages: copies take a third less time or better. Without support by the system, small pages are used.

MPI allocates a window that ranks share at any address. So its memory is mapped again at an aligned address, and each
rank collapses the small pages of its part into huge ones (`MADV_COLLAPSE`, Linux 6.1).
"""

import ctypes
import mmap
import platform
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

ByteArray: TypeAlias = NDArray[np.uint8]
Range: TypeAlias = tuple[int, int]
"""First and last, exclusive."""

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MAPS = Path("/proc/self/maps")
_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2  # of mremap(2)
_MADV_DONTNEED, _MADV_WIPEONFORK, _MADV_COLLAPSE = 4, 18, 25  # of madvise(2)
_FAILED = ctypes.c_void_p(-1).value
_MADVISE_CALLS = {"x86_64": 28, "aarch64": 233}
"""The number of the system call madvise, by machine."""


def private_pages(size_bytes: int) -> mmap.mmap:
    """Zeroed memory of this process alone, in huge pages where there are. Raises OSError or OverflowError. In a forked
    process it is zeros; otherwise each later write would copy a page. (It has its addresses there too: with
    MADV_DONTFORK they could be given to other memory, which the end of this object would unmap.)"""
    pages = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        for advice in (mmap.MADV_HUGEPAGE, _MADV_WIPEONFORK):
            with suppress(OSError):  # not every kernel has it
                pages.madvise(advice)
    return pages


def freeing(parts: Iterable[ByteArray]) -> Callable[[], None]:
    """A function that gives the whole pages of `parts`, private memory, back to the system: they are zeros when used
    again."""
    ranges = []
    for part in parts:
        first, stop = part.ctypes.data, part.ctypes.data + part.nbytes
        first, stop = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
        if first < stop:
            ranges.append((ctypes.c_void_p(first), ctypes.c_size_t(stop - first), ctypes.c_int(_MADV_DONTNEED)))
    # UCX, which MPICH uses, replaces madvise, and keeps a record of each call for memory that it has registered.
    number, library = _MADVISE_CALLS.get(platform.machine()), _library()
    madvise = library.madvise if number is None else partial(library.syscall, ctypes.c_long(number))

    def free() -> None:
        for pages in ranges:
            madvise(*pages)

    return free


@dataclass(frozen=True, slots=True)
class SecondMapping:
    """A second mapping of memory, `view`; `release` unmaps it."""

    view: ByteArray
    _reserved: int
    _reserved_bytes: int

    def collapse(self, ranges: Iterable[Range]) -> int:
        """Collapse the small pages in `ranges` of the view into huge ones. Returns the bytes of the huge pages."""
        huge, asked = huge_bytes(), 0
        for start, stop in merged(ranges):
            first = self.view.ctypes.data + start
            skipped = -first % huge
            length = (stop - start - skipped) // huge * huge
            if length <= 0:
                continue
            begins = self.view[start + skipped :][:length:huge]
            begins.max()  # reading allocates a small page: without one, nothing can be collapsed
            _library().madvise(first + skipped, length, _MADV_COLLAPSE)
            asked += length
        return asked

    def release(self) -> None:
        _library().munmap(self._reserved, self._reserved_bytes)


def second_mapping(part: ByteArray) -> SecondMapping | None:
    """A second mapping of `part`, page-aligned shared memory, at an address for huge pages; None if that fails."""
    huge = huge_bytes()
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    if not huge or part.nbytes < 2 * huge or limited:  # a smaller part may contain no whole huge page
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
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    reserved = library.mmap(None, reserved_bytes, 0, anonymous, -1, 0)
    if reserved == _FAILED:
        return None
    # The address and the offset in the file must be equal modulo the size of a huge page.
    address = reserved + (offset - reserved) % huge
    # `mremap` with `old_size=0` maps the same shared pages again.
    if library.mremap(part.ctypes.data, 0, whole, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) == _FAILED:
        return None  # do not unmap: another mapping may be at the reserved address by now
    view = np.ctypeslib.as_array((ctypes.c_uint8 * part.nbytes).from_address(address))
    return SecondMapping(view, reserved, reserved_bytes)


@cache
def huge_bytes() -> int:
    try:
        return int(_SIZE.read_text())
    except (OSError, ValueError):
        return 0


def merged(ranges: Iterable[Range]) -> Sequence[Range]:
    """The same bytes in as few disjoint ranges as possible."""
    apart: list[Range] = []
    for start, stop in sorted(ranges):
        if apart and start <= apart[-1][1]:
            apart[-1] = apart[-1][0], max(stop, apart[-1][1])
        elif stop > start:
            apart.append((start, stop))
    return apart


def _offset_in_file(part: ByteArray, maps: str) -> int | None:
    """The offset of `part` in its file, from the text of /proc/PID/maps; None if it is not one shared mapping."""
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
    """The C library, for functions that Python's mmap lacks. Raises AttributeError without them."""
    library = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.restype = library.mremap.restype = address
    library.mmap.argtypes = [address, size, number, number, number, ctypes.c_long]
    library.mremap.argtypes = [address, size, size, number, address]
    library.munmap.argtypes = [address, size]
    library.madvise.argtypes = [address, size, number]
    return library
