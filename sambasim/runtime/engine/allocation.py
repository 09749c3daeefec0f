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
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # glibc takes no larger one
_NEVER = 2**31 - 1

_ROOMS = 32
"""How many pieces of free addresses the heap is given, each a little smaller than what is mapped by itself."""
_ROOM_BYTES = _LARGEST_MMAP_THRESHOLD - (1 << 20)
_FENCE_BYTES = 64

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
    if all(told):
        _extend_heap()
    return all(told)


@cache  # a second time, there would be twice as many
def _extend_heap() -> None:
    """Give the heap free addresses, about 1 GiB, where the system gives memory in huge pages once something is written.

    A small piece of each room is never freed. In one large room, pieces would find place that are else mapped by
    themselves and given back, and the process would hold more: a GPT-2 of 124 million parameters 0.4 GB. What is free
    already is used by the rooms first; in a thread with a heap of its own, the process's own heap stays as it is.
    """
    huge, library = huge_bytes(), _library()
    if not huge or not _addresses_are_free():
        return
    end = library.sbrk(0)
    rooms = [library.malloc(_ROOM_BYTES) for _ in range(_ROOMS)]
    first, last = -(-end // huge) * huge, library.sbrk(0) // huge * huge
    if last > first:
        library.madvise(first, last - first, mmap.MADV_HUGEPAGE)
    for room in rooms:
        library.realloc(room, _FENCE_BYTES)


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
    library.realloc.restype, library.realloc.argtypes = address, [address, size]
    library.sbrk.restype, library.sbrk.argtypes = address, [ctypes.c_ssize_t]
    library.madvise.argtypes = [address, size, number]
    return library
