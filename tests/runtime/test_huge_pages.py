"""Memory that is mapped again, for huge pages, is the same memory."""

import mmap
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from sambasim.runtime.machine.node_memory import ByteArray, huge_bytes, merged, private_pages, second_mapping

HUGE = huge_bytes()
needs_huge_pages = pytest.mark.skipif(not HUGE, reason="this system has no huge pages")


def _gives() -> bool:
    settings = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return settings.exists() and "[never]" not in settings.read_text()


def _gathers() -> bool:
    """Whether it gathers small pages of shared memory: Linux 6.1, whatever it gives by itself."""
    major, minor = map(int, os.uname().release.split(".")[:2])
    settings = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return (major, minor) >= (6, 1) and settings.exists() and "[deny]" not in settings.read_text()


@dataclass(frozen=True)
class Shared:
    view: ByteArray
    descriptor: int

    @property
    def present_bytes(self) -> int:
        return os.fstat(self.descriptor).st_blocks * 512


@pytest.fixture
def file() -> Iterator[Shared]:
    """From the second small page of a file on, four huge pages and a bit."""
    descriptor = os.memfd_create("shared")
    os.ftruncate(descriptor, 5 * HUGE)
    pages = mmap.mmap(descriptor, 4 * HUGE + 100, offset=mmap.PAGESIZE)
    yield Shared(np.frombuffer(pages, dtype=np.uint8), descriptor)
    os.close(descriptor)


@pytest.fixture
def shared(file: Shared) -> ByteArray:
    return file.view


def in_huge_pages(view: ByteArray, kind: str) -> int:
    """Bytes of the mapping of `view` that lie in huge pages, as the system says."""
    rows = iter(Path("/proc/self/smaps").read_text().splitlines())
    for row in rows:
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", row)
        if bounds and int(bounds[1], 16) <= view.ctypes.data < int(bounds[2], 16):
            return next(int(row.split()[1]) * 1024 for row in rows if row.startswith(f"{kind}:"))
    raise AssertionError("the memory is not mapped")


@needs_huge_pages
def test_what_is_written_to_one_mapping_is_read_from_the_other(shared: ByteArray) -> None:
    shared[:] = np.arange(shared.nbytes) % 251
    again = second_mapping(shared)
    assert again is not None
    assert again.view.nbytes == shared.nbytes
    assert again.view.ctypes.data != shared.ctypes.data
    assert np.array_equal(again.view, shared)
    again.view[-1] = 252
    shared[0] = 253
    assert (shared[-1], again.view[0]) == (252, 253)
    again.release()
    assert (shared[-1], shared[0]) == (252, 253)


@pytest.mark.skipif(not HUGE or not _gathers(), reason="this system gathers no pages of shared memory")
def test_what_is_gathered_stays_and_nothing_beside_it_is_touched(file: Shared) -> None:
    file.view[HUGE + 5] = 7
    again = second_mapping(file.view)
    assert again is not None
    before = file.present_bytes
    # From the second small page of the file on, only two huge pages lie wholly in this.
    assert again.collapse([(HUGE, 2 * HUGE), (2 * HUGE, 4 * HUGE - 5)]) == 2 * HUGE
    assert in_huge_pages(again.view, "ShmemPmdMapped") == 2 * HUGE
    assert file.present_bytes - before <= 2 * HUGE
    assert again.view[HUGE + 5] == 7
    assert int(again.view.sum()) == 7
    assert again.collapse([(0, HUGE - mmap.PAGESIZE - 1), (3, 3)]) == 0
    again.release()


@pytest.mark.skipif(not HUGE or not _gives(), reason="this system gives no huge pages")
def test_private_memory_comes_in_huge_pages() -> None:
    view = np.frombuffer(private_pages(4 * HUGE), dtype=np.uint8)
    assert not view.any()
    view.setflags(write=True)
    view[:] = 1
    assert in_huge_pages(view, "AnonHugePages") >= 2 * HUGE  # the system chooses the address


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux clears memory in a forked process (MADV_WIPEONFORK)")
def test_a_forked_process_has_zeros_and_frees_nothing_of_its_own() -> None:
    pages = private_pages(1 << 20)
    pages[0] = 7
    pid = os.fork()
    if pid == 0:
        try:
            own = [private_pages(1 << 20) for _ in range(4)]
            before = pages[0]
            del pages
            for one in own:
                one[0] = 1
            os._exit(before)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pages[0] == 7


@needs_huge_pages
def test_memory_that_is_too_little_or_private_is_mapped_once(shared: ByteArray) -> None:
    assert second_mapping(shared[:HUGE]) is None
    assert second_mapping(np.frombuffer(mmap.mmap(-1, 4 * HUGE, mmap.MAP_PRIVATE), dtype=np.uint8)) is None


def test_ranges_are_merged() -> None:
    assert merged([(8, 9), (0, 2), (2, 4), (3, 3), (3, 6), (7, 7)]) == [(0, 6), (8, 9)]
    assert merged([]) == []
