"""Memory that a step frees is kept for the next step, in huge pages.

Activations come and go with each pass. The C library gives large pieces back to the system as soon as they are freed,
and the system hands out pages anew, one fault and 4096 zeros each: thousands of them in every step. And of small pages
a processor looks up many: on a virtual machine, a GPT's pass took 2 to 4 % less time with its activations in huge ones.
"""

import ctypes
import mmap
import resource
from functools import cache
from pathlib import Path

from sambasim.runtime.huge_pages import huge_bytes

_M_TRIM_THRESHOLD = -1  # mallopt(3)
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no larger one
_NEVER = 2**31 - 1
_USUAL_TOP_PAD = 128 << 10

_HEAP_BYTES = 1 << 30
"""How far the heap is made to reach. These are addresses: the system gives memory where something is written."""

_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_ADDRESSES_COUNT = "2"
"""With this setting, the system promises memory for addresses too."""


def keep_freed_memory() -> bool:
    """Tell the C library to keep what is freed, in this process; says whether it can be told. It is so with glibc."""
    try:
        library = _library()
    except (OSError, AttributeError):
        return False
    told = [library.mallopt(_M_TRIM_THRESHOLD, _NEVER), library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)]
    if all(told) and huge_bytes() and _addresses_are_free():
        _extend_heap(library)
    return all(told)


def _extend_heap(library: ctypes.CDLL) -> None:
    """Have the heap end _HEAP_BYTES further on, and what is new of it be given in huge pages.

    The heap is only extended for a piece that finds no room. So where a call before has done this, nothing is done; nor
    in a thread that has a heap of its own.
    """
    huge, end = huge_bytes(), library.sbrk(0)
    library.mallopt(_M_TOP_PAD, _HEAP_BYTES)
    library.free(library.malloc(_LARGEST_MMAP_THRESHOLD - mmap.PAGESIZE))
    library.mallopt(_M_TOP_PAD, _USUAL_TOP_PAD)
    first, last = -(-end // huge) * huge, library.sbrk(0) // huge * huge
    if last > first:
        library.madvise(first, last - first, mmap.MADV_HUGEPAGE)


def _addresses_are_free() -> bool:
    """Whether this process may have as many as it likes."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    if any(limit != resource.RLIM_INFINITY for limit in limits):
        return False
    try:
        return _OVERCOMMIT.read_text().strip() != _ADDRESSES_COUNT
    except OSError:
        return False


@cache
def _library() -> ctypes.CDLL:
    """The C library. Raises AttributeError where it has no such functions."""
    library = ctypes.CDLL(None)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mallopt.argtypes = [number, number]
    library.malloc.restype, library.malloc.argtypes = address, [size]
    library.free.argtypes = [address]
    library.sbrk.restype, library.sbrk.argtypes = address, [ctypes.c_ssize_t]
    library.madvise.argtypes = [address, size, number]
    return library
