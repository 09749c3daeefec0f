"""What a step frees stays with the process, and in huge pages where addresses cost nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from sambasim.runtime.huge_pages import huge_bytes

_TIMEOUT_S = 60
ROOMS_BYTES = 900 << 20
"""What the rooms that the heap is given are together, at least."""

_PASSES = """
import resource, sys
import numpy as np
from sambasim.runtime.engine.allocation import keep_freed_memory

def heap_bytes(row):
    rows = iter(open("/proc/self/smaps").read().splitlines())
    found = 0
    for one in rows:
        if one.endswith("[heap]"):
            found += next(int(other.split()[1]) for other in rows if other.startswith(row + ":")) * 1024
    return found

if len(sys.argv) > 1:
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))
assert keep_freed_memory()
assert keep_freed_memory()
after = heap_bytes("Size")
def step():
    pieces = [np.empty(3 << 19, np.uint8) for _ in range(20)]
    for piece in pieces:
        piece.fill(1)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, after, heap_bytes("AnonHugePages"))
"""


def _passes(*arguments: str) -> tuple[int, int, int]:
    """Page faults of a second step that needs what the first one freed, 30 MiB; bytes of the heap before the steps;
    and how many of them lie in huge pages after them."""
    command = [sys.executable, "-c", _PASSES, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    faults, size, huge = map(int, result.stdout.split())
    return faults, size, huge


def test_a_second_step_finds_the_memory_of_the_first() -> None:
    faults, _, _ = _passes()
    assert faults < 20  # of the 7,680 small pages


def test_the_heap_is_extended_once_and_given_in_huge_pages() -> None:
    settings, overcommit = Path("/sys/kernel/mm/transparent_hugepage/enabled"), Path("/proc/sys/vm/overcommit_memory")
    if not huge_bytes() or "[never]" in settings.read_text() or overcommit.read_text().strip() == "2":
        pytest.skip("this system gives no huge pages, or counts addresses as memory")
    _, size, huge = _passes()
    assert ROOMS_BYTES <= size < 2 * ROOMS_BYTES
    assert huge >= 10 * huge_bytes()


def test_what_is_large_is_given_back() -> None:
    large = """
import os
import numpy as np
from sambasim.runtime.engine.allocation import keep_freed_memory

def held_pages():
    return int(open("/proc/self/statm").read().split()[1])

keep_freed_memory()
before = held_pages()
piece = np.ones(48 << 20, np.uint8)
during = held_pages()
del piece
page = os.sysconf("SC_PAGE_SIZE")
print((during - before) * page, (held_pages() - before) * page)
"""
    result = subprocess.run(
        [sys.executable, "-c", large], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    )
    during, after = map(int, result.stdout.split())
    assert during >= 48 << 20
    assert after <= 4 << 20


def test_no_address_is_spent_where_they_are_limited() -> None:
    faults, size, _ = _passes("limited")
    assert faults < 20
    assert size < ROOMS_BYTES
