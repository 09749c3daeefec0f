"""A small part of what `make fuzz` does, the same mutants each time; and that the fuzzer sees what must not happen."""

import json
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from sambasim.errors import InternalError, PefError
from tests.fuzz import __main__ as fuzz
from tests.fuzz.mutate import edit_json, mutate_bytes
from tests.fuzz.subjects import Subject
from tests.support.mpi import ROOT


def test_mutants_are_read_or_refused_and_nothing_else() -> None:
    words = [sys.executable, "-m", "tests.fuzz", "--count", "40", "--seed", "1998"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": 40 mutants, ") == 6


def test_a_mutant_is_the_same_each_time() -> None:
    fields = json.dumps({"a": [1, {"b": "x" * 50}], "c": None, "d": list(range(50))}).encode()
    for mutation in (mutate_bytes, edit_json()):
        mutants = [[mutation(Random(number), fields) for number in range(50)] for _ in range(2)]
        assert mutants[0] == mutants[1]
        assert len({*mutants[0]}) > 25


def refuse(path: Path) -> None:
    raise PefError("it is no PEF")


def break_down(path: Path) -> None:
    raise InternalError("ours")


@pytest.mark.parametrize(
    ("reader", "fault"),
    [
        (Path.read_bytes, None),
        (refuse, "refused"),
        (break_down, "InternalError: ours"),
        (lambda path: 1 / 0, "ZeroDivisionError"),
        (lambda path: time.sleep(20), "it took more than 1 s"),
    ],
)
def test_the_fuzzer_sees_what_must_not_happen(
    reader: object, fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz, "_SECONDS", 1)
    (tmp_path / "file").write_bytes(b"x")
    assert callable(reader)
    found = fuzz.read(Subject("", lambda folder: [], (), (reader,)), tmp_path / "file")
    assert found == fault or (fault is not None and found is not None and fault in found)
