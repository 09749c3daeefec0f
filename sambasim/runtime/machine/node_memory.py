"""The memory of this node: in huge pages where the system has them, with which copies take a third less time or better;
and /dev/shm, which the ranks share.

MPI allocates a window that ranks share at any address. So its memory is mapped again at an aligned address, and each
rank collapses the small pages of its part into huge ones (`MADV_COLLAPSE`, Linux 6.1), which takes seconds for each
gigabyte: during the first steps. Names in /dev/shm are removed once all ranks have mapped them, so that the memory is
freed however the processes end.
"""

import ctypes
import errno
import mmap
import os
import platform
import resource
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sambasim.errors import MachineError
from sambasim.ir.types import align
from sambasim.units import MIB, format_bytes

ByteArray: TypeAlias = NDArray[np.uint8]
Range: TypeAlias = tuple[int, int]  # first and last, exclusive

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2  # of mremap(2)
_MADV_DONTNEED, _MADV_WIPEONFORK, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 4, 18, 23, 25  # of madvise(2)
_FAILED = ctypes.c_void_p(-1).value
_AT_ONCE = 16  # huge pages that one call of madvise collapses
_MADVISE_CALLS = {"x86_64": 28, "aarch64": 233}  # the number of the system call, by machine

MPI_RESERVE_BYTES = 5 * MIB
"""What MPI uses for each rank of a node while it runs; measured, see docs/operations.md."""
MPI_START_BYTES = 12 * MIB
"""What MPI uses in addition while it starts, once for each node. With less, it crashes or stops sharing memory."""

FOLDER = Path("/dev/shm")
_LARGER = f"make {FOLDER} larger (docker: --shm-size; elsewhere: mount -o remount,size=SIZE {FOLDER})"
_TOO_LITTLE = f"the replicas of this node need {{}} of shared memory, and {FOLDER} has {{}} free"


def private_storage(size_bytes: int, touched: Iterable[Range] | None = None) -> ByteArray:
    """Zeroed memory of this process, page-aligned, in huge pages where there are; where only parts are `touched`, in
    those that are touched as a whole, because the first access allocates all of a page. Raises MachineError if there is
    too little. In a forked process it is zeros, at the same addresses; otherwise each later write would copy a page."""
    try:
        pages = mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        what = f"the machine does not give {format_bytes(size_bytes)} of memory for a device: {error}"
        raise MachineError(what, remedy="raise `ulimit -v`, or compile a smaller model or batch") from error
    page, huge, length = mmap.PAGESIZE, huge_bytes(), max(size_bytes, 1)
    of_pages = [(0, length)] if touched is None else [(a // page * page, align(b, page)) for a, b in touched if a < b]
    large = [(start, stop) for start, stop in merged(of_pages) if touched is None or stop - start >= huge > 0]
    advised = [(mmap.MADV_NOHUGEPAGE, 0, length)] * (touched is not None)
    advised += [(mmap.MADV_HUGEPAGE, start, min(stop, length) - start) for start, stop in large]
    for advice in (*advised, (_MADV_WIPEONFORK, 0, length)):
        with suppress(OSError):  # not every kernel has it
            pages.madvise(*advice)
    return np.frombuffer(pages, dtype=np.uint8)[:size_bytes]


def freeing(parts: Iterable[ByteArray]) -> Callable[[], None]:
    """A function that gives the whole pages of `parts`, private memory, back to the system: then they are zeros."""
    ranges = []
    for part in parts:
        first = align(part.ctypes.data, mmap.PAGESIZE)
        stop = (part.ctypes.data + part.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < stop:
            ranges.append((ctypes.c_void_p(first), ctypes.c_size_t(stop - first), ctypes.c_int(_MADV_DONTNEED)))
    # UCX, which MPICH uses, replaces madvise, and keeps a record of each call for memory that it has registered.
    number, library = _MADVISE_CALLS.get(platform.machine()), _library()
    madvise = library.madvise if number is None else partial(library.syscall, ctypes.c_long(number))

    def free() -> None:
        for pages in ranges:
            madvise(*pages)

    return free


def populate(view: ByteArray, ranges: Iterable[Range]) -> None:
    """Allocate the pages of `ranges`, which are about to be written: one after the other takes twice as long."""
    page, begin = mmap.PAGESIZE, view.ctypes.data
    for start, stop in merged(ranges):
        first = (begin + start) // page * page
        _library().madvise(first, begin + stop - first, _MADV_POPULATE_WRITE)  # not every kernel has it


def collapse(view: ByteArray, ranges: Iterable[Range], goes_on: Callable[[], bool] = lambda: True) -> int:
    """Collapse the small pages in `ranges` of `view` into huge ones, while it `goes_on`. Returns their bytes."""
    huge, asked = huge_bytes(), 0
    for start, stop in merged(ranges):
        first = view.ctypes.data + start
        skipped = -first % huge
        length = (stop - start - skipped) // huge * huge
        for begin in range(0, length, _AT_ONCE * huge):
            if not goes_on():
                return asked
            size = min(length - begin, _AT_ONCE * huge)
            # Reading allocates a small page: without one, nothing can be collapsed.
            view[start + skipped + begin :][:size:huge].max()
            _library().madvise(first + skipped + begin, size, _MADV_COLLAPSE)
            asked += size
    return asked


def collapsing(view: ByteArray, ranges: Iterable[Range]) -> Callable[[], None]:
    """Begins to `collapse` in a thread; returns what ends it, which has to be called before `view` is unmapped."""
    ended = threading.Event()
    thread = threading.Thread(target=collapse, args=(view, ranges, lambda: not ended.is_set()), daemon=True)
    thread.start()

    def end() -> None:
        ended.set()
        thread.join()

    return end


def second_mapping(part: ByteArray) -> tuple[ByteArray, Callable[[], object]] | None:
    """A second mapping of `part`, page-aligned shared memory, at an address for huge pages, and what unmaps it; None if
    that fails."""
    huge = huge_bytes()
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    if not huge or part.nbytes < 2 * huge or limited:  # a smaller part may contain no whole huge page
        return None
    try:
        offset, library = _offset_in_file(part), _library()
    except (OSError, AttributeError):
        return None
    whole = align(part.nbytes, mmap.PAGESIZE)
    anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if offset is None or (reserved := library.mmap(None, whole + huge, 0, anonymous, -1, 0)) == _FAILED:
        return None
    # The address and the offset in the file must be equal modulo the size of a huge page.
    address = reserved + (offset - reserved) % huge
    # `mremap` with `old_size=0` maps the same shared pages again.
    if library.mremap(part.ctypes.data, 0, whole, _MREMAP_MAYMOVE | _MREMAP_FIXED, address) == _FAILED:
        return None  # do not unmap: another mapping may be at the reserved address by now
    view = np.ctypeslib.as_array((ctypes.c_uint8 * part.nbytes).from_address(address))
    return view, partial(library.munmap, reserved, whole + huge)


@cache
def huge_bytes() -> int:
    try:
        return int(Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").read_text())
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


def _offset_in_file(part: ByteArray) -> int | None:
    """The offset of `part` in its file; None if it is not one shared mapping."""
    address = part.ctypes.data
    for line in _maps().splitlines():
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


class Demand(NamedTuple):
    """The bytes that one rank needs, and those that are free on its node; None if unknown."""

    node_index: int
    host_name: str
    needed_bytes: int
    free_bytes: int | None


@dataclass(slots=True)
class Promised:
    """The shared memory that this process's windows need, and what was free before: untouched pages count as free."""

    bytes: int = 0
    free_before: int | None = None


def free_bytes() -> int | None:
    """The free bytes of shared memory; None without /dev/shm."""
    if not FOLDER.is_dir():
        return None
    status = os.statvfs(FOLDER)
    return status.f_bavail * status.f_frsize


def mapped_names() -> frozenset[Path]:
    """The named segments that this process has mapped, whose name still exists; empty without /proc."""
    fields = (line.split(maxsplit=5) for line in _maps().splitlines())  # the last one is the path, if there is one
    named = (line[5] for line in fields if len(line) > 5)
    return frozenset(Path(name) for name in named if name.startswith(f"{FOLDER}/") and not name.endswith(" (deleted)"))


def _maps() -> str:
    maps = Path("/proc/self/maps")
    return maps.read_text(encoding="utf-8", errors="surrogateescape") if maps.exists() else ""


def unlink(names: Iterable[Path]) -> None:
    """Remove the names, if other ranks have not yet; the memory stays as long as a process maps it."""
    for name in names:
        name.unlink(missing_ok=True)


_FEWER = f"{_LARGER}, or run with fewer replicas or a smaller batch"


def check_demands(demands: Sequence[Demand], what: str = _TOO_LITTLE, remedy: str = _FEWER) -> None:
    """Raise MachineError, `what` with both figures, if the ranks of a node together need more than is free."""
    for index in sorted({demand.node_index for demand in demands}):
        of_node = [demand for demand in demands if demand.node_index == index]
        needed = sum(demand.needed_bytes for demand in of_node)
        there = min((demand.free_bytes for demand in of_node if demand.free_bytes is not None), default=needed)
        if needed > there:
            text, where = what.format(format_bytes(needed), format_bytes(there)), f"host {of_node[0].host_name}"
            raise MachineError(text, where=where, remedy=remedy)


def check_start(ranks: int, host_name: str, there_bytes: int | None) -> None:
    """Raise MachineError if so many ranks of this node cannot start MPI with `there_bytes` of shared memory."""
    if ranks > 1:
        demand = Demand(0, host_name, ranks * MPI_RESERVE_BYTES + MPI_START_BYTES, there_bytes)
        what = f"MPI needs about {{}} of shared memory to start {ranks} ranks on one node, and {FOLDER} has {{}} free"
        check_demands([demand], what, _LARGER)


def try_mapping(size_bytes: int, host_name: str, rank: int) -> None:
    """Map that much shared memory without touching it, and unmap it. Raises MachineError, with its limit."""
    if not FOLDER.is_dir():
        return
    try:
        with tempfile.TemporaryFile(dir=FOLDER) as file:
            os.ftruncate(file.fileno(), size_bytes)
            mmap.mmap(file.fileno(), size_bytes).close()
    except OSError as error:
        space, limit = resource.getrlimit(resource.RLIMIT_AS)[0], f"{FOLDER} has {format_bytes(free_bytes() or 0)} free"
        if error.errno == errno.EFBIG:
            limit = f"a file may have {format_bytes(resource.getrlimit(resource.RLIMIT_FSIZE)[0])} (ulimit -f)"
        elif error.errno == errno.ENOMEM and space != resource.RLIM_INFINITY:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
            limit = f"its address space has {format_bytes(max(space - used, 0))} left (ulimit -v)"
        need = f"the replicas of this node need a shared window of {format_bytes(size_bytes)}"
        what = f"{need}, which rank {rank} cannot map: {error.strerror}: {limit}"
        remedy = "raise what limits it, or run with fewer replicas or a smaller batch"
        raise MachineError(what, where=f"host {host_name}", remedy=remedy) from error


def window_error(needed_bytes: int, host_name: str, reason: str) -> MachineError:
    """The error for a window that MPI cannot create although the system could."""
    there = free_bytes()
    has = "" if there is None else f" ({FOLDER} has {format_bytes(there)} free)"
    what = f"MPI cannot create a shared window of {format_bytes(needed_bytes)} for the replicas of this node"
    remedy = f"run without --reduce-on-rdu, or with another MPI; or {_LARGER}"
    return MachineError(f"{what}: {reason}{has}", where=f"host {host_name}", remedy=remedy)
