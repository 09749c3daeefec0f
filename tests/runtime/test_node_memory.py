"""Memory that is mapped again, for huge pages, is the same memory; and what does not fit is rejected, with the bytes
needed and available."""

import mmap
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sambasim.errors import MachineError
from sambasim.hardware.budget import available_bytes
from sambasim.hardware.spec import load_device
from sambasim.runtime.machine.communicator import single_rank
from sambasim.runtime.machine.node_memory import (
    ByteArray,
    Demand,
    check_demands,
    check_start,
    collapse,
    huge_bytes,
    merged,
    private_storage,
    second_mapping,
)
from sambasim.runtime.machine.process import check_device, check_node_memory
from sambasim.units import GIB, MIB
from tests.pef.samples import sample_document

HUGE = huge_bytes()
needs_huge_pages = pytest.mark.skipif(not HUGE, reason="this system has no huge pages")


def _allows(file: str, forbidden: str) -> bool:
    settings = Path("/sys/kernel/mm/transparent_hugepage") / file
    return bool(HUGE) and settings.exists() and forbidden not in settings.read_text()


_GATHERS = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 1) and _allows("shmem_enabled", "[deny]")
"""Whether this system gathers small pages of shared memory, whatever it gives by itself."""


@pytest.fixture
def file() -> Iterator[int]:
    """The descriptor of a file of five huge pages."""
    descriptor = os.memfd_create("shared")
    os.ftruncate(descriptor, 5 * HUGE)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def shared(file: int) -> ByteArray:
    """From the second small page of the file on, four huge pages and a bit."""
    return np.frombuffer(mmap.mmap(file, 4 * HUGE + 100, offset=mmap.PAGESIZE), dtype=np.uint8)


def in_huge_pages(view: ByteArray, kind: str) -> int:
    """Bytes of `kind` of the mapping in which `view` begins, as the system says."""
    rows = iter(Path("/proc/self/smaps").read_text().splitlines())
    for row in rows:
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", row)
        if bounds and int(bounds[1], 16) <= view.ctypes.data < int(bounds[2], 16):
            return next(int(row.split()[1]) * 1024 for row in rows if row.startswith(f"{kind}:"))
    raise AssertionError("the memory is not mapped")


@needs_huge_pages
def test_what_is_written_to_one_mapping_is_read_from_the_other(shared: ByteArray) -> None:
    shared[:] = np.arange(shared.nbytes) % 251
    mapping = second_mapping(shared)
    assert mapping is not None
    again, unmap = mapping
    assert again.ctypes.data != shared.ctypes.data
    assert np.array_equal(again, shared)
    again[-1], shared[0] = 252, 253
    assert (shared[-1], again[0]) == (252, 253)
    unmap()
    assert (shared[-1], shared[0]) == (252, 253)


@pytest.mark.skipif(not _GATHERS, reason="this system gathers no pages of shared memory")
def test_what_is_gathered_stays_and_nothing_beside_it_is_touched(file: int, shared: ByteArray) -> None:
    shared[HUGE + 5] = 7
    mapping = second_mapping(shared)
    assert mapping is not None
    again, unmap = mapping
    before = os.fstat(file).st_blocks
    # From the second small page of the file on, only two huge pages lie wholly in this.
    assert collapse(again, [(HUGE, 2 * HUGE), (2 * HUGE, 4 * HUGE - 5)]) == 2 * HUGE
    assert in_huge_pages(again, "ShmemPmdMapped") == 2 * HUGE
    assert (os.fstat(file).st_blocks - before) * 512 <= 2 * HUGE
    assert (again[HUGE + 5], int(again.sum())) == (7, 7)
    assert collapse(again, [(0, HUGE - mmap.PAGESIZE - 1), (3, 3)]) == 0
    unmap()


@pytest.mark.skipif(not _allows("enabled", "[never]"), reason="this system gives no huge pages")
def test_private_memory_comes_in_huge_pages() -> None:
    view = private_storage(4 * HUGE)
    assert not view.any()
    view.setflags(write=True)
    view[:] = 1
    assert in_huge_pages(view, "AnonHugePages") >= 2 * HUGE  # the system chooses the address


@pytest.mark.skipif(not _allows("enabled", "[never]"), reason="this system gives no huge pages")
def test_private_memory_that_is_touched_in_parts_has_no_more_than_these() -> None:
    parts = [(start, start + HUGE // 4) for start in range(0, 16 * HUGE, HUGE)]
    view = private_storage(24 * HUGE, [*parts, (17 * HUGE, 20 * HUGE), (20 * HUGE, 23 * HUGE + 5)])
    view.setflags(write=True)
    for start, stop in (*parts, (17 * HUGE, 23 * HUGE)):
        view[start:stop] = 1
    assert in_huge_pages(view, "AnonHugePages") == 0
    assert in_huge_pages(view, "Rss") <= 4 * HUGE
    assert in_huge_pages(view[18 * HUGE :], "AnonHugePages") >= 5 * HUGE


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux clears memory in a forked process (MADV_WIPEONFORK)")
def test_a_forked_process_has_zeros_and_frees_nothing_of_its_own() -> None:
    pages = private_storage(1 << 20)
    pages[0] = 7
    pid = os.fork()
    if pid == 0:
        try:
            own = [private_storage(1 << 20) for _ in range(4)]
            before = int(pages[0])
            del pages
            for memory in own:
                memory[0] = 1
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


def refused(words: str) -> "pytest.RaisesExc[MachineError]":
    return pytest.raises(MachineError, match=words)


def test_more_memory_than_the_device_or_the_machine_has_is_refused_with_both_figures() -> None:
    of_sn10 = replace(sample_document(), compile_options={"arch": "sn10"})
    fits, larger = (
        of_sn10.only(program=replace(of_sn10.program, device_bytes=device_bytes))
        for device_bytes in (load_device("sn10").ddr_capacity_bytes, 2 << 40)
    )
    check_device(fits)
    with refused(r"^one replica of this PEF needs 2\.0 TiB of device memory, but a SN10 has 1\.5 TiB\n"):
        check_device(larger)
    with refused("memory of this node's replicas is .*, and the machine has .* of memory available\n  where: host c"):
        check_node_memory(single_rank("c"), 1 << 60)


def test_more_shared_memory_than_there_is_is_refused_with_both_figures() -> None:
    fits = [Demand(node, f"host-{node}", 3 * GIB, free * GIB) for node, free in ((0, 6), (0, 6), (1, 4))]
    check_demands(fits)
    what = r"^the replicas of this node need 5\.0 GiB of shared memory, and /dev/shm has 4\.0 GiB free\n"
    with refused(what + r"  where: host host-1\n  try:   make /dev/shm larger \(docker: --shm"):
        check_demands([*fits, Demand(1, "host-1", 2 * GIB, 4 * GIB)])
    for ranks, there_bytes in ((1, 0), (2, None), (2, 22 * MIB)):
        check_start(ranks, "here", there_bytes)
    what = r"^MPI needs about 22\.0 MiB of shared memory to start 2 ranks on one node, and .*\n  where: host here\n"
    with refused(what):
        check_start(2, "here", 22 * MIB - 1)


def test_available_memory_is_that_of_the_system_or_of_its_control_group(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    for file, text, expected in (
        ("proc/meminfo", "MemTotal:  9 kB\nMemFree: 3 kB\nMemAvailable:      1048576 kB\nHugePages_Total: 0\n", GIB),
        ("proc/self/cgroup", "4:memory:/old\n0::/jobs/one\n", GIB),
        ("sys/fs/cgroup/jobs/one/memory.max", "max\n", GIB),
        ("sys/fs/cgroup/jobs/one/memory.current", "5000\n", GIB),
        ("sys/fs/cgroup/jobs/one/memory.max", "9000\n", 4000),
        ("sys/fs/cgroup/jobs/one/memory.stat", "anon 4000\ninactive_file 1000\n", 5000),
        ("sys/fs/cgroup/jobs/memory.current", "6000\n", 5000),
        ("sys/fs/cgroup/jobs/memory.max", "7000\n", 1000),
    ):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text, encoding="ascii")
        assert available_bytes(tmp_path) == expected, (file, text)
