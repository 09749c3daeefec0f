"""Copies of a process that answer: what they give, and how they may end."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from sambasim import forks
from sambasim.errors import InternalError, InvariantError
from sambasim.forks import Fork


def test_each_answer_begins_anew() -> None:
    counts = [0]

    def count(step: Any) -> int:
        counts[0] += step
        return counts[0]

    fork: Fork[int] = Fork(count, lambda: None)
    assert [fork.ask(2), fork.ask(2)] == [2, 2]
    fork.close()
    assert counts == [0]


def test_what_raises_has_no_answer_a_fault_of_ours_is_raised_and_the_next_request_has_an_answer() -> None:
    def work(divisor: float) -> float:
        if divisor == 3:
            raise InvariantError(3, "of a test")
        return 1 / divisor

    fork: Fork[float] = Fork(work, lambda: None)
    assert fork.ask(0) is None
    with pytest.raises(InternalError, match="invariant 3: of a test"):
        fork.ask(3)
    assert fork.ask(2) == 0.5
    fork.close()


def test_what_ends_its_process_has_no_answer() -> None:
    fork: Fork[None] = Fork(lambda request: os.kill(os.getpid(), signal.SIGKILL), lambda: None)
    assert fork.ask() is None
    fork.close()


def test_a_helper_that_holds_the_pipe_of_a_copy_that_has_ended_keeps_nobody_waiting() -> None:
    def work(request: object) -> None:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"], close_fds=False)
        os.kill(os.getppid(), signal.SIGKILL)

    def inherited() -> None:
        for name in os.listdir("/proc/self/fd"):
            os.set_inheritable(int(name), int(name) > 2) if os.path.exists(f"/proc/self/fd/{name}") else None

    fork: Fork[None] = Fork(work, inherited)
    began_s = time.monotonic()
    assert fork.ask() is None
    assert time.monotonic() - began_s < 10
    fork.close()


def test_a_copy_that_waits_for_ever_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_LONGEST_WAIT_S", 1.0)
    fork: Fork[None] = Fork(lambda request: signal.pause(), lambda: None)
    assert fork.ask() is None
    fork.close()


def test_a_copy_that_works_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_LONGEST_WAIT_S", 0.5)

    def work(request: object) -> int:
        until_s = time.monotonic() + 1.5
        while time.monotonic() < until_s:
            pass
        return 7

    fork: Fork[int] = Fork(work, lambda: None)
    assert fork.ask() == 7
    fork.close()
