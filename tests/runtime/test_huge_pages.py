"""Memory that is mapped again, for huge pages, is the same memory."""

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from sambasim.runtime import huge_pages
from sambasim.runtime.buffers import ByteArray
from sambasim.runtime.huge_pages import advise, huge_bytes, mapped_again, merged

HUGE = huge_bytes()
needs_huge_pages = pytest.mark.skipif(not HUGE, reason="this system has no huge pages")


@pytest.fixture
def shared() -> ByteArray:
    """Shared memory from the second small page of a file on, of four huge pages and a bit."""
    descriptor = os.memfd_create("shared")
    os.ftruncate(descriptor, 5 * HUGE)
    pages = mmap.mmap(descriptor, 4 * HUGE + 100, offset=mmap.PAGESIZE)
    os.close(descriptor)
    return np.frombuffer(pages, dtype=np.uint8)


@needs_huge_pages
def test_what_is_written_to_one_mapping_is_read_from_the_other(shared: ByteArray) -> None:
    shared[:] = np.arange(shared.nbytes) % 251
    again = mapped_again(shared)
    assert again is not None
    assert again.view.nbytes == shared.nbytes
    assert again.view.ctypes.data != shared.ctypes.data
    assert np.array_equal(again.view, shared)
    again.view[-1] = 252
    shared[0] = 253
    assert (shared[-1], again.view[0]) == (252, 253)
    again.release()
    assert (shared[-1], shared[0]) == (252, 253)


@needs_huge_pages
def test_it_lies_where_huge_pages_can(shared: ByteArray) -> None:
    again = mapped_again(shared)
    assert again is not None
    assert again.view.ctypes.data % HUGE == mmap.PAGESIZE
    again.release()


@needs_huge_pages
def test_what_is_gathered_stays_and_nothing_beside_it_is_touched(shared: ByteArray) -> None:
    shared[HUGE + 5] = 7
    again = mapped_again(shared)
    assert again is not None
    before = _present_bytes(shared)
    # From the second small page of the file on, only two huge pages lie wholly in this.
    assert again.gather([(HUGE, 2 * HUGE), (2 * HUGE, 4 * HUGE - 5)]) == 2 * HUGE
    assert _present_bytes(shared) - before <= 2 * HUGE
    assert again.view[HUGE + 5] == 7
    assert int(again.view.sum()) == 7
    assert again.gather([(0, HUGE - mmap.PAGESIZE - 1), (3, 3)]) == 0
    again.release()


def _present_bytes(view: ByteArray) -> int:
    """Of the file that `view` is mapped from: what is there of it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(bound, 16) for bound in line.split()[0].split("-"))
        if low <= view.ctypes.data < high:
            descriptor = os.open(f"/proc/self/map_files/{line.split()[0]}", os.O_RDONLY)
            try:
                return os.fstat(descriptor).st_blocks * 512
            finally:
                os.close(descriptor)
    raise AssertionError("the memory is not mapped")


@needs_huge_pages
def test_memory_that_is_too_little_or_private_is_mapped_once(shared: ByteArray) -> None:
    assert mapped_again(shared[:HUGE]) is None
    assert mapped_again(np.frombuffer(mmap.mmap(-1, 4 * HUGE, mmap.MAP_PRIVATE), dtype=np.uint8)) is None


def test_without_huge_pages_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "huge_bytes", lambda: 0)
    pages = mmap.mmap(-1, 1 << 23)
    advise(pages)
    assert mapped_again(np.frombuffer(pages, dtype=np.uint8)) is None


def test_ranges_are_merged() -> None:
    assert merged([(8, 9), (0, 2), (2, 4), (3, 3), (3, 6), (7, 7)]) == [(0, 6), (8, 9)]
    assert merged([]) == []
