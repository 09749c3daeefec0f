"""A small part of `make fuzz`, the same mutants each time, and a test of the fuzzer itself."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sambasim.pef import read as read_pef
from tests.fuzz import __main__ as fuzz
from tests.fuzz.subjects import Subject
from tests.support.mpi import run_job


def test_mutants_are_read_or_refused_and_nothing_else() -> None:
    words = [sys.executable, "-m", "tests.fuzz", "--count", "8", "--seed", "1998"]
    done = run_job(words, timeout=280).check()
    assert done.stdout.count(": 8 mutants, ") == 7


def test_the_fuzzer_finds_a_wrong_error_and_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "_SECONDS", 1)
    (tmp_path / "file").write_bytes(b"x")

    def read(reader: Callable[[Path], object]) -> str | None:
        return fuzz.read(Subject("", lambda folder: [], (), (reader,)), tmp_path / "file")

    assert read(Path.read_bytes) is None
    assert read(read_pef) == "refused"
    assert "ZeroDivisionError" in str(read(lambda path: 1 / 0))
    assert "it took more than 1 s" in str(read(lambda path: time.sleep(20)))
