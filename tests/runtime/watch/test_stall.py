"""Which ranks have died or stall the job, decided from observations; and what is observed of a node."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import sambasim.runtime
from sambasim.errors import PeerError, StallError
from sambasim.runtime.watch.status_file import STARTING, RankStatus, State, StatusFile
from sambasim.runtime.watch.watchdog import (
    LEAVING_S,
    WAIT,
    Observation,
    OtherNodes,
    Process,
    Watchdog,
    dead_ranks,
    death_error,
    is_stalled,
    is_wait,
    missing_ranks,
    observe,
    process_of,
    stall_error,
    start_time,
    user_line,
)

TIMEOUT_S = 300.0
R, W, B = State.RUNNING, State.WAITING, State.BUSY
RUNNING, STOPPED, GONE, SILENT = Process.RUNNING, Process.STOPPED, Process.GONE, Process.SILENT


def seen(
    rank: int, state: State = W, idle_s: float = 301, process: Process = RUNNING, *, step: int = 17, at: str = ""
) -> Observation:
    doing = "waiting for peers" if state is W else "reading data"
    return Observation(RankStatus(rank, f"node{rank}", 100 + rank, step, 0, state, doing, at), idle_s, process)


def numbers(ranks: Sequence[Observation]) -> list[int]:
    return [rank.status.rank for rank in ranks]


STALLED = {
    "running": [seen(1, R)],
    "one waits since now": [seen(1, R), seen(2, idle_s=0.5)],
    "stopped": [seen(1, process=STOPPED), seen(2)],
    "behind": [seen(1, step=16), seen(2)],
    "ended": [seen(1, State.ENDED), seen(2)],
    "busy and stopped": [seen(1, B, process=STOPPED)],
    "host is silent": [seen(1, R, 4.0, SILENT)],
}
"""What rank 1, for which rank 0 waits, and others do."""


@pytest.mark.parametrize("others", STALLED.values(), ids=STALLED)
def test_rank_1_stalls_the_job(others: Sequence[Observation]) -> None:
    everybody = [seen(0), *others]
    assert is_stalled(everybody[0], everybody, TIMEOUT_S)
    assert numbers(missing_ranks(everybody)) == [1]


def test_a_rank_may_start_slowly_whatever_the_timeout() -> None:
    for idle_s, process, stalls in [(59.0, RUNNING, False), (61.0, RUNNING, True), (3.0, STOPPED, True)]:
        started = Observation(replace(seen(1, R).status, doing=STARTING), idle_s, process)
        everybody = [seen(0), started]
        assert is_stalled(everybody[0], everybody, 2.0) is stalls
        waited = "2.00 s" if process is STOPPED else "60.00 s"
        assert stall_error(everybody, 2.0).what == f"rank 1 kept the other ranks waiting for {waited}"


NOT_STALLED = {
    "slow": [seen(0), seen(1, R, 2.0)],
    "one of two is slow": [seen(0), seen(1, R), seen(2, R, 2.0)],
    "this rank waits since now": [seen(0, idle_s=2.0), seen(1, R)],
    "this rank does not wait": [seen(0, R), seen(1, R)],
    "all wait, one just began": [seen(0), seen(1, idle_s=0.5)],
    "just stopped": [seen(0), seen(1, W, 2.0, STOPPED), seen(2)],
    "ends the job itself": [seen(0), seen(1, State.LEAVING)],
    "busy": [seen(0), seen(1, B)],
}


@pytest.mark.parametrize("ranks", NOT_STALLED.values(), ids=NOT_STALLED)
def test_the_job_is_not_stalled(ranks: Sequence[Observation]) -> None:
    assert not is_stalled(ranks[0], ranks, TIMEOUT_S)


def test_a_process_that_is_gone_before_its_end_is_dead() -> None:
    ranks = [seen(rank, state, 0.0, GONE) for rank, state in enumerate((R, W, B, State.ENDED))]
    leaving = [seen(4, State.LEAVING, 0.5, GONE), seen(5, State.LEAVING, LEAVING_S, GONE)]
    assert numbers(dead_ranks([*ranks, *leaving, seen(6), seen(7, R, process=Process.UNKNOWN)])) == [0, 1, 2, 5]


def test_errors_name_the_ranks_and_what_they_did() -> None:
    died = death_error([seen(1, R, process=GONE)])
    assert (type(died), died.rank) == (PeerError, 1)
    assert str(died).splitlines()[:2] == [
        "rank 1 died without an error message",
        "  where: rank 1 on node1 (process 101): step 17, reading data",
    ]
    stalled = stall_error([seen(0), seen(1, R, at="net.py:3 in read"), seen(2, R, 400)], TIMEOUT_S)
    assert (type(stalled), stalled.rank, stalled.exit_code, stalled.code) == (StallError, 1, 4, "stall")
    assert str(stalled).splitlines() == [
        "ranks 1 and 2 kept the other ranks waiting for 300.00 s",
        "  where: rank 1 on node1 (process 101): step 17, reading data for 301.00 s, at net.py:3 in read",
        "         rank 2 on node2 (process 102): step 17, reading data for 400.00 s",
        "  try:   find out why that line does not return; --sync-timeout SECONDS waits longer",
    ]
    mutual = stall_error([seen(0), seen(1)], TIMEOUT_S)
    assert mutual.rank is None
    assert str(mutual).startswith("all ranks have waited for each other for 300.00 s")


def test_a_rank_that_waits_within_a_section_waits() -> None:
    everybody = [seen(0, R, at=WAIT), seen(1, R)]
    assert is_stalled(everybody[0], everybody, TIMEOUT_S)
    assert numbers(missing_ranks(everybody)) == [1]
    assert not is_stalled(everybody[1], everybody, TIMEOUT_S)
    placed = replace(everybody[1], status=replace(everybody[1].status, mesh="pp 1, tp 0"))
    assert "where: rank 1 on node1 (process 101; pp 1, tp 0): step 17" in str(stall_error([placed], TIMEOUT_S))


@pytest.mark.parametrize(
    ("file", "waits"), [("transports/messages.py", True), ("machine/mpi.py", True), ("job.py", False)]
)
def test_a_thread_waits_if_its_innermost_frame_communicates(file: str, waits: bool) -> None:
    path = Path(sambasim.runtime.__file__).parent / file
    assert path.is_file()
    assert eval(compile("is_wait(sys._getframe())", str(path), "eval"), {"sys": sys, "is_wait": is_wait}) is waits


def test_the_line_of_python_is_that_of_the_user() -> None:
    line = sys._getframe().f_lineno + 1
    assert user_line(sys._getframe()) == f"{__file__}:{line} in test_the_line_of_python_is_that_of_the_user"
    assert user_line(None) == ""


@pytest.fixture
def two_ranks(tmp_path: Path) -> StatusFile:
    made = StatusFile.create([tmp_path], "b.txt", 2)
    for index in range(2):
        made.activity(index).begin(index, "here", os.getpid())
    return made


def test_idle_time_counts_while_a_line_does_not_change(two_ranks: StatusFile) -> None:
    observed: list[Observation] = []

    def idle(passed_s: float) -> list[float]:
        observed[:] = observe(two_ranks, [start_time("self"), b"1"], observed, passed_s)
        return [rank.idle_s for rank in observed]

    assert idle(100.0) == [0, 0]
    two_ranks.activity(1).at("net.py:3 in read")  # no progress
    assert idle(0.25) == [0.25, 0.25]
    two_ranks.activity(1).step(1)
    assert idle(0.25) == [0.5, 0]
    assert idle(4500.0) == [1.5, 1.0], "time without observations counts little"
    assert [rank.process for rank in observed] == [RUNNING, GONE]


def test_a_process_is_running_then_stopped_then_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        started = start_time(process.pid)
        states = [process_of(process.pid, since) for since in (started, b"1", None)]
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        states.append(process_of(process.pid, started))
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        states.append(process_of(process.pid, started))
    assert [*states, process_of(process.pid, started)] == [RUNNING, GONE, Process.UNKNOWN, STOPPED, GONE, GONE]


def test_stopping_a_watchdog_waits_for_its_last_observation(two_ranks: StatusFile) -> None:
    """It may be using MPI, which is about to end."""
    steps: list[str] = []

    def answer(observed: Sequence[Observation]) -> None:
        steps.append("began")
        time.sleep(0.3)
        steps.append("done")

    others = cast(OtherNodes, SimpleNamespace(answer=answer))
    watchdog = Watchdog(two_ranks, [None, None], 0, 60.0, others, lambda error: steps.append(str(error)))
    watchdog.start()
    while not steps:
        time.sleep(0.01)
    watchdog.stop(wait_s=20)
    assert steps == ["began", "done"]
