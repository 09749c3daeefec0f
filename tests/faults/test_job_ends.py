"""How a job ends: whatever happens to rank 1 ends all ranks, with one error that names it, and nothing is left behind.

`run_mpi` checks that no process and no shared memory is left. `TIMEOUT_S` is the `--sync-timeout` of these runs.
"""

import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from sambasim.runtime.watch.status_file import State, StatusFile
from tests.faults.fault import Compiled, dataset, put
from tests.support.mpi import SAMBASIM, Result, can_play_hosts, run_job, run_mpi
from tests.support.warm import JOB_KEY
from tests.support.whole import whole, whole_case

TIMEOUT_S = 2
_RUN = [*SAMBASIM, "run", "--data", "net.py:samples", "--sync-timeout", str(TIMEOUT_S), "--pef"]
_ENDLESS = ("--epochs", "100000")
_SHORT = ("--epochs", "3", "--no-evaluate")
_END_S = 15.0  # how long a job may live after a failure, also on a busy machine

_SAMPLE = """import os, signal, time
self.seen = getattr(self, "seen", 0) + 1
if self.seen > 40 and torch.distributed.get_rank() == 1:
    open("failed", "w").close()
    {action}
return torch.randn(8), i % 3"""

_MPIRUN = f"""
import os


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


@pytest.fixture
def folder(tmp_path: Path, compiled: Compiled) -> Path:
    """With the PEFs of two replicas, and of one replica of two ranks."""
    put(tmp_path, compiled, "pair", "cut", "stages")
    return tmp_path


def run(
    folder: Path,
    action: str,
    *flags: str,
    pef: str = "pair",
    around: Sequence[str] = (),
    length: Sequence[str] = _ENDLESS,
    **how: int,
) -> Result:
    """A run in whose midst rank 1 does `action`; mpirun starts each rank by way of `around`. `how`: `np`, `hosts`."""
    (folder / "net.py").write_text(_MPIRUN + dataset(_SAMPLE.format(action=action), 64))
    command = [*around, *_RUN, pef, *length, *flags]
    result = run_mpi(how.get("np", 2), command, cwd=folder, timeout=120, hosts=how.get("hosts", 1))
    if length == _ENDLESS and (folder / "failed").exists():
        assert time.time() - (folder / "failed").stat().st_mtime < _END_S
    return result


def status_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*-ranks-*.txt"))


def assert_error(result: Result, what: str, where: str) -> None:
    assert result.returncode == 4, result.stderr
    assert result.stderr.count("error[") == 1
    assert re.search(rf"^error{what}.*\n  where: {where}", result.stderr, re.M), result.stderr


def assert_stall(result: Result, where: str, seen_by: str = r"rank 0 on \S+", rank: int = 1) -> None:
    assert_error(result, rf"\[stall\] \(seen by {seen_by}\): rank {rank} kept the other ranks waiting", where)
    assert len(re.findall(r"rank \d on \S+ \(process", result.stderr)) <= 1
    assert "--sync-timeout" in result.stderr


STOPPED = r"its process is stopped; step \d+, reading"
HANGS = r"step \d+, reading data for \S+ s, at {folder}/net.py:\d+ in __getitem__"


def assert_death(result: Result) -> None:
    where = r"rank 1 on \S+ \(process \d+\): step \d+, reading data"
    assert_error(result, r"\[peer\] \(seen by rank 0 on \S+\): rank 1 died without an error", where)


@pytest.mark.parametrize(
    ("action", "sync", "says"),
    [
        ("time.sleep(3600)", "--reduce-on-rdu", HANGS),
        whole_case("time.sleep(3600)", "--host-sync=gloo", HANGS),
        whole_case("time.sleep(3600)", "--host-sync=mpi", HANGS),
        whole_case("os.kill(os.getpid(), signal.SIGSTOP)", "--host-sync=gloo", STOPPED),
    ],
)
def test_a_rank_that_hangs_or_is_stopped_is_named_with_its_line(
    folder: Path, action: str, sync: str, says: str
) -> None:
    result = run(folder, action, sync, np=3)
    assert_stall(result, rf"rank 1 on \S+ \(process \d+\): {says.format(folder=folder)}", r"rank [02] on \S+")
    assert status_files(folder) == []


def test_a_rank_that_is_slow_is_waited_for(folder: Path) -> None:
    slow = "time.sleep(0.1 if self.seen < 64 else 0)"
    result = run(folder, slow, length=("--steps", "16")).check()
    assert result.elapsed_s > TIMEOUT_S
    assert "whole step" in result.stdout
    assert status_files(folder) == []


def test_an_error_says_what_its_rank_was_doing_and_where_its_log_is(folder: Path) -> None:
    """With the coordinates of the rank, as its log."""
    result = run(folder, 'raise OSError("the disk is full")', "--log-dir", "logs", pef="stages")
    assert result.returncode == 2
    assert result.stderr.count("error[") == 1
    block = result.stderr[result.stderr.index("error[data] (rank 1 on ") :].splitlines()
    assert re.match(r"error\[data\] \(rank 1 on \S+: pp 1\): .* raised OSError: the disk is full", block[0])
    assert re.fullmatch(r"  doing: step \d+, reading data", block[-2])
    assert block[-1] == "  log:   logs/rank1.log"
    assert status_files(folder) == []
    assert "notice: rank 1 (local 1): pp 1\n" in result.stdout
    assert "start stages: rank 1 of 2, local rank 1: pp 1; sync" in (folder / "logs" / "rank1.log").read_text()


def test_where_no_rank_can_report_the_status_file_says_what_each_was_doing(folder: Path) -> None:
    result = run(folder, "os.kill(os.getpid(), signal.SIGKILL)", "--reduce-on-rdu")
    assert result.returncode != 0
    assert "error[" not in result.stderr
    (left,) = status_files(folder)
    assert f"status file: {left} says what each rank does" in result.stdout
    ranks = StatusFile(left).ranks()
    assert [status.rank for status in ranks] == [0, 1]
    assert (ranks[1].state, ranks[1].doing) == (State.RUNNING, "reading data")
    assert ranks[1].step > 5


@whole
@pytest.mark.parametrize("action", ["os._exit(0)", "os._exit(86)"])
def test_a_rank_that_exits_silently_ends_the_job(folder: Path, action: str) -> None:
    result = run(folder, action)
    left = status_files(folder)
    if "error[" in result.stderr:
        assert_death(result)
        assert left == []
    else:  # mpirun was faster, and killed the ranks
        assert [StatusFile(path).ranks()[1].doing for path in left] == ["reading data"]


def test_a_death_that_mpirun_does_not_notice_is_noticed_by_the_other_ranks(folder: Path) -> None:
    # What mpirun starts lives on, and so does the connection between them.
    wrapper = "import subprocess, sys, time; subprocess.run(sys.argv[1:], close_fds=False); time.sleep(600)"
    assert_death(run(folder, "os.kill(os.getpid(), signal.SIGKILL)", around=[sys.executable, "-c", wrapper]))
    assert status_files(folder) == []


def test_a_time_limit_ends_a_process_that_hangs_in_mpi() -> None:
    """As in MPI's start, with the interpreter locked."""
    body = """
import ctypes
import time
from pathlib import Path
from sambasim.runtime.machine.communicator import single_rank
from sambasim.ir.mesh import Mesh
from sambasim.runtime.watch import supervisor
supervisor.LEAST_LIMIT_S = 0.0
supervisor.limit_time(0.2, 0)
supervisor.Supervisor(single_rank("here"), report=print, exit_code=int).start(Path(), None, 1.0, Mesh({}))
time.sleep(0.5)
print("the limit has been removed", flush=True)
supervisor.limit_time(0.2, 1)
ctypes.PyDLL(None).sleep(60)
"""
    result = run_job([sys.executable, "-c", body])
    assert (result.returncode, result.stdout) == (1, "the limit has been removed\n")
    assert re.match(r"Timeout \(0:00:01.2.*\)!", result.stderr)
    assert result.elapsed_s < 30


@pytest.mark.parametrize(
    ("finalize", "exit_code", "reported"),
    [
        whole_case("os.kill(os.getpid(), signal.SIGSTOP)", None, r"^Timeout \(0:01:00\)!(.|\n)*in finish"),
        ("1 / 0", 70, r"^error\[internal\] \(rank 1 on \S+\): .*division by zero"),
        whole_case("os._exit(86)", None, ""),
    ],
)
def test_a_rank_that_fails_while_mpi_ends_ends_the_job(
    folder: Path, finalize: str, exit_code: int | None, reported: str
) -> None:
    result = run(folder, f"import mpi4py.MPI as mpi; mpi.Finalize = lambda: {finalize}", length=_SHORT)
    assert result.returncode != 0
    assert exit_code in (None, result.returncode)
    assert "whole step" in result.stdout
    assert result.stderr.count("error[") <= 1
    assert re.search(reported, result.stderr, re.M), result.stderr
    (left,) = status_files(folder)
    status = StatusFile(left).ranks()[1]
    assert (status.state, status.doing) == (State.RUNNING, "done, MPI is ending")


@pytest.mark.skipif(not can_play_hosts(), reason="it takes the privilege to change the host name of a process")
@pytest.mark.parametrize(
    ("action", "where"),
    [
        ("time.sleep(3600)", rf"rank 1 on played-1 \(process \d+\): {HANGS}"),
        whole_case("os.kill(os.getpid(), signal.SIGSTOP)", r"rank 1 on played-1: no answer for \S+ s"),
    ],
)
def test_a_rank_on_another_host_is_named(folder: Path, action: str, where: str) -> None:
    result = run(folder, action, hosts=2)
    assert_stall(result, where.format(folder=folder), seen_by="rank 0 on played-0")


_FAILING = """
import sys, time
from sambasim.errors import DataError, LaunchError, PeerError, SambasimError
from sambasim.runtime.machine.mpi import connect
from sambasim.runtime.watch.supervisor import Supervisor

def report(failure):
    print(f"REPORT {{failure.rank}} {{failure.alike}} {{failure.error!r}}", file=sys.stderr)

def exit_code(error):
    return error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", 70)

def fail(error):
    raise error

c = connect(["failing"])
c.allocate_shared(1 << 20).parts[c.local_rank][:] = c.rank
empty = DataError("empty")
with Supervisor(c, report=report, exit_code=exit_code):
    {action}
"""


@pytest.mark.parametrize(
    ("action", "code", "report"),
    [
        ("fail(empty) if c.rank == 2 else c.barrier()", 2, "2 False DataError('empty')"),
        whole_case("1 / 0 if c.rank == 1 else time.sleep(60)", 70, "1 False ZeroDivisionError('division by zero')"),
        ("fail(LaunchError('too few', remedy='mpirun -np 8'))", 2, "0 True LaunchError('too few')"),
        whole_case("fail(DataError(f'no {c.rank}')) if c.rank != 1 else c.barrier()", 2, "0 False DataError('no 0')"),
        whole_case("fail(empty if c.rank == 1 else PeerError('no answer of 1'))", 2, "1 False DataError('empty')"),
        ("sys.exit(0) if c.rank == 1 else c.barrier()", 1, "1 False SystemExit(0)"),
        whole_case("sys.exit(3)", 3, None),
    ],
)
def test_the_lowest_rank_that_failed_by_itself_reports(action: str, code: int, report: str | None) -> None:
    env = {"MPIR_CVAR_NUM_CLIQUES": "2"} if "rank == 2" in action else {}  # as on two nodes
    result = run_mpi(3, [sys.executable, "-c", _FAILING.format(action=action)], env=env, timeout=30)
    lines = [line for line in result.stderr.splitlines() if line.startswith("REPORT")]
    assert lines == ([] if report is None else [f"REPORT {report}"])
    assert result.returncode == code
    assert "Traceback" not in result.stderr
    if "LaunchError" in action:
        assert result.stderr.count("\n") == 1, "without an abort"


@pytest.mark.parametrize(("pef", "axis"), [whole_case("cut", "tp"), ("stages", "pp")])
def test_a_rank_that_hangs_is_found_by_those_that_wait_within_a_section(pef: str, axis: str, folder: Path) -> None:
    result = run(folder, "time.sleep(3600)", pef=pef)
    where = rf"rank 1 on \S+ \(process \d+; {axis} 1\): step \d+, reading data for .*net\.py:\d+ in __getitem__"
    assert_error(result, rf"\[stall\] \(seen by rank 0 on \S+: {axis} 0\): rank 1 kept the", where)
    assert not status_files(folder)


@pytest.mark.usefixtures("fresh")  # mpirun must be an ancestor. The last one: from here on, processes start anew
@pytest.mark.parametrize(
    ("action", "exit_code"),
    [
        # In a long stretch without MPI no rank notices by itself.
        ("os.kill(mpirun(), signal.SIGKILL); time.sleep(60)", -signal.SIGKILL),
        whole_case("os.kill(mpirun(), signal.SIGTERM)", None),
        whole_case("os.kill(mpirun(), signal.SIGINT)", None),
        whole_case("os.kill(os.getpid(), signal.SIGTERM)", None),
    ],
)
def test_nothing_is_left_of_a_job_that_is_killed(action: str, exit_code: int | None, folder: Path) -> None:
    result = run(folder, action, "--reduce-on-rdu")
    assert (folder / "failed").exists(), result.stderr
    assert exit_code in (None, result.returncode)
