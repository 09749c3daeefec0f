"""A small part of what `make fuzz` does, the same mutants each time; and that the fuzzer sees what it is to see."""

import os
import time
from pathlib import Path
from random import Random

import pytest

from sambasim.errors import InternalError, PefError
from tests.fuzz.campaign import campaign
from tests.fuzz.raw import RAW
from tests.fuzz.subject import MIB, Way
from tests.fuzz.subjects import DYING, SUBJECTS
from tests.fuzz.watch import Watch
from tests.fuzz.worker import attempt

COUNTS = {"pef": 80, "checkpoint": 60, "arrays": 40, "records": 10, "tensors": 40, "toml": 40}


@pytest.mark.parametrize("name", SUBJECTS)
def test_mutants_are_refused_or_taken_and_nothing_else(name: str, tmp_path: Path) -> None:
    tally = campaign(SUBJECTS[name], tmp_path, seed=1998, numbers=range(COUNTS[name]), workers=1)
    assert tally.findings == []
    assert tally.mutants == COUNTS[name]
    assert len(tally.mutations) > 1


def test_a_mutant_is_the_same_each_time() -> None:
    samples = [bytes(range(200)) * 20, b"PK" * 2000]
    for mutation in RAW:
        assert mutation(Random(7), samples) == mutation(Random(7), samples)


def opens_elsewhere(path: Path) -> None:
    Path("/etc/hostname").exists()
    with Path("/etc/passwd").open() as file:
        file.read(1)


def takes_memory(path: Path) -> None:
    bytearray(os.urandom(64) * MIB)


def has_a_mistake(path: Path) -> None:
    raise InternalError("ours")


def starts_a_program(path: Path) -> None:
    os.system("true")


def never_ends(path: Path) -> None:
    while True:
        pass


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Watch:
    return Watch(tmp_path_factory.mktemp("watched"))


@pytest.mark.parametrize(
    ("enter", "told"),
    [
        (opens_elsewhere, "open /etc/passwd"),
        (takes_memory, "and 1 are allowed"),
        (has_a_mistake, "InternalError: ours"),
        (starts_a_program, "os.system"),
        (never_ends, "it took more than 0.2 s"),
        (lambda path: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_the_fuzzer_sees_what_may_not_be(enter: object, told: str, watch: Watch, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    assert callable(enter)
    seconds = 0.2 if enter is never_ends else 20  # the machine may be busy
    fault, _ = attempt(Way("a way", enter, seconds=seconds, constant_bytes=MIB), tmp_path / "file", watch)
    assert fault is not None
    assert told in fault


@pytest.mark.parametrize(("waits", "outcome"), [(1, (None, True)), (2, ("it took more than 2 s", False))])
def test_a_way_in_that_waited_is_tried_once_more(
    waits: int, outcome: tuple[str | None, bool], watch: Watch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    entered: list[Path] = []

    def enter(path: Path) -> None:
        entered.append(path)
        if len(entered) <= waits:
            time.sleep(60)

    assert attempt(Way("a way", enter, seconds=2), tmp_path / "file", watch) == outcome
    assert len(entered) == 2


def test_a_refusal_is_no_finding(watch: Watch, tmp_path: Path) -> None:
    def refuses(path: Path) -> None:
        raise PefError("it is no PEF")

    (tmp_path / "file").write_bytes(b"x")
    assert attempt(Way("a way", refuses, constant_bytes=MIB), tmp_path / "file", watch) == (None, False)


def test_a_process_that_dies_is_a_finding_and_the_rest_is_tried(tmp_path: Path) -> None:
    tally = campaign(DYING, tmp_path, seed=1, numbers=range(8), workers=1)
    assert tally.mutants == 8
    died = [int(str(finding["number"])) for finding in tally.findings]
    assert 0 < len(died) < 8
    assert died == [number for number in range(8) if DYING.mutant(1, number, [b"0"])[1] == b"die"]
    assert all("the process ended with -6" in str(finding["finding"]) for finding in tally.findings)
    assert (tmp_path / "findings" / f"1-{died[0]}.txt").read_bytes() == b"die"
