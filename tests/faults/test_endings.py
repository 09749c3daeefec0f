"""However a run ends, nothing is left of it: no process, and no segment of shared memory. `run_mpi` looks for both."""

import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.texts import dataset
from tests.support.mpi import JOB_KEY, run_mpi
from tests.support.whole import whole, whole_case

_RUN = [sys.executable, "-m", "sambasim", "run", "--pef", "pair", "--data", "net.py:samples"]
_END_S = 15.0
"""So long after the blow the job is over, also on a busy machine; of its own it would train for many minutes."""

_MPIRUN = f"""
import os
import signal
import time


def mpirun():
    # The oldest ancestor that bears the mark of this job.
    found, pid = None, os.getpid()
    while pid > 1:
        with open(f"/proc/{{pid}}/environ", "rb") as marks:
            if b"{JOB_KEY}=" not in marks.read():
                break
        found = pid
        with open(f"/proc/{{pid}}/stat") as fields:
            pid = int(fields.read().rpartition(")")[2].split()[1])
    return found


"""
_SAMPLE = """self.seen = getattr(self, "seen", 0) + 1
if self.seen > 40 and torch.distributed.get_rank() == 1:
    open("struck", "w").close()
    {deed}
return torch.randn(8), i % 3"""


@dataclass(frozen=True, slots=True)
class Ending:
    """What rank 1 does in the middle of a run, how mpirun ends, and what is said of it, if anything."""

    name: str
    deed: str
    exit_codes: frozenset[int]
    told: str | None = None


_FAILURE = frozenset(range(-64, 256)) - {0}
_WHATEVER = _FAILURE | {0}
"""MPICH 3.4.3's mpirun, asked to end, now and then says that all went well."""

ENDINGS = (
    Ending("an exception", 'raise OSError("the disk is full")', frozenset({2}), "error[data] (rank 1 on "),
    Ending("a rank leaves", "os._exit(7)", _FAILURE),
    Ending("a rank is killed", "os.kill(os.getpid(), signal.SIGKILL)", _FAILURE),
    Ending("a rank is terminated", "os.kill(os.getpid(), signal.SIGTERM)", _FAILURE),
    Ending("mpirun is interrupted", "os.kill(mpirun(), signal.SIGINT)", _WHATEVER),
    Ending("mpirun is terminated", "os.kill(mpirun(), signal.SIGTERM)", _WHATEVER),
    # In a long stretch without MPI no rank notices by itself.
    Ending("mpirun is killed", "os.kill(mpirun(), signal.SIGKILL); time.sleep(60)", frozenset({-signal.SIGKILL})),
)

_IN_PART = ("an exception", "a rank is killed", "mpirun is terminated", "mpirun is killed")
CASES = [pytest.param(one, id=one.name, marks=() if one.name in _IN_PART else whole) for one in ENDINGS]


@pytest.fixture
def folder(tmp_path: Path, compiled: Mapping[str, bytes]) -> Path:
    """A folder with the PEF `pair`."""
    path = tmp_path / "out" / "pair" / "pair.pef"
    path.parent.mkdir(parents=True)
    path.write_bytes(compiled["pair"])
    return tmp_path


@pytest.mark.parametrize("sync", ["--reduce-on-rdu", whole_case("host")])
@pytest.mark.parametrize("ending", CASES)
def test_nothing_is_left_of_a_run(ending: Ending, sync: str, folder: Path) -> None:
    (folder / "net.py").write_text(_MPIRUN + dataset(_SAMPLE.format(deed=ending.deed), 64))
    result = run_mpi(2, [*_RUN, "--epochs", "100000", *([sync] if sync != "host" else [])], cwd=folder, timeout=90)
    assert (folder / "struck").exists(), result.stderr
    assert time.time() - (folder / "struck").stat().st_mtime < _END_S
    assert result.returncode in ending.exit_codes
    if ending.told is not None:
        assert result.stderr.count("error[") == 1
        assert ending.told in result.stderr


@pytest.mark.parametrize("sync", ["--reduce-on-rdu", "host"])
def test_nothing_is_left_of_a_run_that_ended_well(sync: str, folder: Path) -> None:
    (folder / "net.py").write_text(dataset("return torch.randn(8), i % 3", 64))
    command = [*_RUN, "--steps", "5", *([sync] if sync != "host" else [])]
    result = run_mpi(2, command, cwd=folder).check()
    assert result.stdout.splitlines()[1].startswith("pair: ")
