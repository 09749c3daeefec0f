"""A rank that dies in silence, or keeps the others waiting, ends the job; one block says which it was and what it did.

What a rank does to itself stands in its data, in the file net.py. `TIMEOUT_S` is the `--sync-timeout` of these runs.
"""

import fcntl
import mmap
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from sambasim.runtime.watch import board
from sambasim.runtime.watch.board import State
from tests.faults.texts import dataset
from tests.support.mpi import Result, can_play_hosts, run_mpi
from tests.support.whole import whole_case

TIMEOUT_S = 2
_RUN = [sys.executable, "-m", "sambasim", "run", "--pef", "pair", "--data", "net.py:samples"]
_ENDLESS = ("--epochs", "100000")
_STRIKES = """import os, signal, time
self.seen = getattr(self, "seen", 0) + 1
if self.seen > 40 and torch.distributed.get_rank() == 1:
    {deed}
return torch.randn(8), i % 3"""


@pytest.fixture
def folder(tmp_path: Path, compiled: Mapping[str, bytes]) -> Path:
    """A folder with the PEF `pair`."""
    path = tmp_path / "out" / "pair" / "pair.pef"
    path.parent.mkdir(parents=True)
    path.write_bytes(compiled["pair"])
    return tmp_path


def struck(
    folder: Path,
    deed: str,
    *flags: str,
    np: int = 2,
    around: Sequence[str] = (),
    hosts: int = 1,
    length: Sequence[str] = _ENDLESS,
) -> Result:
    """A run of `length` in whose midst rank 1 does `deed`; mpirun starts each rank by way of `around`."""
    (folder / "net.py").write_text(dataset(_STRIKES.format(deed=deed), 64))
    command = [*around, *_RUN, *length, "--sync-timeout", str(TIMEOUT_S), *flags]
    return run_mpi(np, command, cwd=folder, timeout=60, hosts=hosts)


def boards(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*-ranks-*.txt"))


@pytest.mark.parametrize("sync", ["--reduce-on-rdu", "--host-sync=gloo", whole_case("--host-sync=mpi")])
def test_a_rank_that_hangs_in_its_data_is_named_with_the_line_that_it_hangs_in(folder: Path, sync: str) -> None:
    result = struck(folder, "time.sleep(3600)", sync)
    assert result.returncode == 4
    assert result.stderr.count("error[") == 1
    assert re.search(r"^error\[stall\] \(seen by rank 0 on \S+\): rank 1 keeps the others waiting", result.stderr, re.M)
    doing = r"rank 1 on \S+ \(process \d+\): step \d+, reading data for \S+ s"
    assert re.search(rf"where: {doing}, at {folder}/net.py:\d+ in __getitem__", result.stderr)
    assert "--sync-timeout" in result.stderr
    assert boards(folder) == []


def test_a_rank_that_is_stopped_is_named_and_leaves_no_process(folder: Path) -> None:
    result = struck(folder, "os.kill(os.getpid(), signal.SIGSTOP)")
    assert result.returncode == 4
    assert re.search(r"where: rank 1 on \S+ \(process \d+\): its process is stopped; step \d+, reading", result.stderr)
    assert boards(folder) == []


def test_a_rank_that_hangs_before_a_checkpoint_is_named(folder: Path) -> None:
    """Its metrics go to somebody who does not read them."""
    (folder / "net.py").write_text(dataset("return torch.randn(8), i % 3", 64))
    os.mkfifo(folder / "m.jsonl")
    reader = os.open(folder / "m.jsonl", os.O_RDWR)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, mmap.PAGESIZE)
    flags = ["--metrics", "m.jsonl", "--checkpoint-dir", "saved", "--checkpoint-every", "1"]
    try:
        result = run_mpi(2, [*_RUN, *_ENDLESS, "--sync-timeout", str(TIMEOUT_S), *flags], cwd=folder, timeout=60)
    finally:
        os.close(reader)
    assert result.returncode == 4
    assert "rank 0 keeps the others waiting" in result.stderr
    assert re.search(r"where: rank 0 on \S+ \(process \d+\): step \d+, telling of the step", result.stderr)


def test_of_three_ranks_only_the_one_that_hangs_is_named(folder: Path) -> None:
    result = struck(folder, "time.sleep(3600)", "--reduce-on-rdu", np=3)
    assert result.returncode == 4
    assert "): rank 1 keeps the others waiting" in result.stderr
    assert len(re.findall(r"rank \d on \S+ \(process", result.stderr)) == 1


@pytest.mark.parametrize("deed", ["os._exit(0)", whole_case("os._exit(86)")])
def test_a_rank_that_leaves_in_silence_ends_the_job_and_is_told_of_or_can_be_looked_up(folder: Path, deed: str) -> None:
    result = struck(folder, deed)
    if "error[" in result.stderr:
        assert_death_is_told(result)
        assert boards(folder) == []
    else:  # mpirun was quicker, and let nobody speak
        (left,) = boards(folder)
        assert board.read(left)[1].doing == "reading data"


def test_a_rank_that_is_stopped_before_mpi_starts_is_named_and_leaves_no_shared_memory(folder: Path) -> None:
    """The others have set it up by then, and wait in MPI, where nobody can take its name away."""
    stop = "import os, signal, sys; os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')) == '3' and "
    wrapper = stop + "os.kill(os.getpid(), signal.SIGSTOP); os.execv(sys.argv[1], sys.argv[1:])"
    result = struck(folder, "pass", np=4, around=[sys.executable, "-c", wrapper])
    assert result.returncode != 0
    assert result.stderr.count("error[stall]") == 1
    assert re.search(r"where: rank 3 \(process \d+\): starting; its process is stopped", result.stderr)


def test_a_rank_that_is_stopped_when_all_is_done_is_ended_and_named(folder: Path) -> None:
    deed = "import mpi4py.MPI as mpi; mpi.Finalize = lambda: os.kill(os.getpid(), signal.SIGSTOP)"
    result = struck(folder, deed, length=["--epochs", "4", "--no-evaluate"])
    assert result.returncode != 0
    assert "state_sha256" in result.stdout
    assert result.stderr.count("error[") == 1
    assert re.search(
        r"^error\[stall\] \(seen by rank \d on \S+\): rank 1 keeps the others waiting", result.stderr, re.M
    )
    assert re.search(r"where: rank 1 \(process \d+\): done, and about to end; its process is stopped", result.stderr)


def test_a_rank_that_leaves_in_silence_when_all_is_done_ends_the_job_and_can_be_looked_up(folder: Path) -> None:
    deed = "import mpi4py.MPI as mpi; mpi.Finalize = lambda: os._exit(86)"
    result = struck(folder, deed, length=["--epochs", "4", "--no-evaluate"])
    assert result.returncode != 0
    assert result.stderr.count("error[") <= 1  # mpirun may be quicker
    (left,) = boards(folder)
    last = {line.rank: line for line in board.read(left)}
    assert last[1].state is not State.ENDED
    assert last[1].doing == "done, and about to end"


def test_what_fails_on_a_rank_when_all_is_done_is_told(folder: Path) -> None:
    deed = "import mpi4py.MPI as mpi; mpi.Finalize = lambda: 1 / 0"
    result = struck(folder, deed, length=["--epochs", "4", "--no-evaluate"])
    assert result.returncode == 70
    assert "state_sha256" in result.stdout
    assert result.stderr.count("error[") == 1
    assert re.search(r"^error\[internal\] \(rank 1 on \S+\): .*division by zero", result.stderr, re.M)
    (left,) = boards(folder)
    assert {line.rank: line.state is State.ENDED for line in board.read(left)} == {0: True, 1: False}


def test_a_death_that_mpirun_does_not_notice_is_noticed_by_the_other_ranks(folder: Path) -> None:
    # What mpirun starts lives on, and so does the connection between them.
    wrapper = "import subprocess, sys, time; subprocess.run(sys.argv[1:], close_fds=False); time.sleep(600)"
    result = struck(folder, "os.kill(os.getpid(), signal.SIGKILL)", around=[sys.executable, "-c", wrapper])
    assert_death_is_told(result)
    assert boards(folder) == []


def assert_death_is_told(result: Result) -> None:
    assert result.returncode == 4
    assert result.stderr.count("error[") == 1
    assert re.search(r"^error\[peer\] \(seen by rank 0 on \S+\): rank 1 died without a word", result.stderr, re.M)
    assert re.search(r"where: rank 1 on \S+ \(process \d+\): step \d+, reading data", result.stderr)


def test_what_each_rank_was_doing_is_left_where_nobody_could_speak(folder: Path) -> None:
    result = struck(folder, "os.kill(os.getpid(), signal.SIGKILL)")
    assert result.returncode != 0
    assert "error[" not in result.stderr
    (left,) = boards(folder)
    assert f"if a rank dies: {left} says what each was doing" in result.stdout
    lines = board.read(left)
    assert [line.rank for line in lines] == [0, 1]
    assert (lines[1].state, lines[1].doing) == (State.RUNNING, "reading data")
    assert lines[1].step > 5


@pytest.mark.parametrize(
    ("deed", "told"),
    [('raise OSError("the disk is full")', "the disk is full"), whole_case("torch.empty(1 << 50)", "memory")],
)
def test_an_error_says_what_its_rank_was_doing_and_where_its_log_is(folder: Path, deed: str, told: str) -> None:
    result = struck(folder, deed, "--log-dir", "logs")
    assert result.returncode == 2
    block = result.stderr[result.stderr.index("error[data] (rank 1 on ") :].splitlines()
    assert told in block[0]
    assert re.fullmatch(r"  doing: step \d+, reading data", block[-2])
    assert block[-1] == "  log:   logs/rank1.log"
    assert boards(folder) == []


def test_a_rank_that_is_slow_but_moves_is_waited_for(folder: Path) -> None:
    slow = "self.slept = getattr(self, 'slept', 0) + 1\n    time.sleep(0.5 if self.slept < 20 else 0)"
    (folder / "net.py").write_text(dataset(_STRIKES.format(deed=slow), 64))
    command = [*_RUN, "--steps", "12", "--sync-timeout", str(TIMEOUT_S)]
    result = run_mpi(2, command, cwd=folder, timeout=60).check()
    assert result.elapsed_s > 2 * TIMEOUT_S
    assert boards(folder) == []


def test_with_json_nothing_but_the_summary_is_printed(folder: Path) -> None:
    (folder / "net.py").write_text(dataset("return torch.randn(8), i % 3", 64))
    result = run_mpi(2, [*_RUN, "--steps", "3", "--json"], cwd=folder).check()
    assert result.stdout.count("\n") == 1
    assert boards(folder) == []


@pytest.mark.skipif(not can_play_hosts(), reason="it takes the privilege to change the host name of a process")
def test_a_rank_that_hangs_on_another_host_is_named_with_the_line_that_it_hangs_in(folder: Path) -> None:
    result = struck(folder, "time.sleep(3600)", hosts=2)
    assert result.returncode == 4
    assert "error[stall] (seen by rank 0 on played-0): rank 1 keeps the others waiting" in result.stderr
    doing = r"rank 1 on played-1 \(process \d+\): step \d+, reading data for \S+ s"
    assert re.search(rf"where: {doing}, at {folder}/net.py:\d+ in __getitem__", result.stderr)
    assert boards(folder) == []


@pytest.mark.skipif(not can_play_hosts(), reason="it takes the privilege to change the host name of a process")
def test_a_host_that_gives_no_answer_is_named(folder: Path) -> None:
    result = struck(folder, "os.kill(os.getpid(), signal.SIGSTOP)", hosts=2)
    assert result.returncode == 4
    assert "error[stall] (seen by rank 0 on played-0): rank 1 keeps the others waiting" in result.stderr
    assert re.search(r"where: rank 1 on played-1: no answer for \S+ s", result.stderr)
