"""What a rank sees of its node: for how long lines have not changed, and which processes are there."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sambasim.runtime.watch import board, processes
from sambasim.runtime.watch.board import Board, State
from sambasim.runtime.watch.processes import Process
from sambasim.runtime.watch.watchdog import Lookout
from sambasim.runtime.watch.whereabouts import line_of

OWN = os.getpid()


@pytest.fixture
def of_two(tmp_path: Path) -> Board:
    made = board.create([tmp_path], "b.txt", 2)
    for index in range(2):
        made.writer(index).begin(index, "here", OWN)
    return made


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def idle(lookout: Lookout, now_s: float) -> list[float]:
    return [one.idle_s for one in lookout.look(now_s)]


def test_a_line_is_idle_for_as_long_as_it_does_not_change(of_two: Board) -> None:
    lookout = Lookout(of_two, [None, None])
    assert idle(lookout, 100.0) == [0, 0]
    assert idle(lookout, 100.25) == [0.25, 0.25]
    of_two.writer(1).step(1)
    assert idle(lookout, 100.5) == [0.5, 0]


def test_the_line_of_python_is_no_movement(of_two: Board) -> None:
    lookout = Lookout(of_two, [None, None])
    lookout.look(100.0)
    of_two.writer(1).at("net.py:3 in read")
    assert idle(lookout, 100.25) == [0.25, 0.25]


def test_the_time_in_which_nobody_looked_counts_little(of_two: Board) -> None:
    lookout = Lookout(of_two, [None, None])
    lookout.look(100.0)
    assert idle(lookout, 5000.0) == [1.0, 1.0]


def test_a_process_is_there_then_stopped_then_gone(sleeper: subprocess.Popen[bytes]) -> None:
    began = processes.began_at(sleeper.pid)
    assert processes.state_of(sleeper.pid, began) is Process.THERE
    os.kill(sleeper.pid, signal.SIGSTOP)
    os.waitpid(sleeper.pid, os.WUNTRACED)
    assert processes.state_of(sleeper.pid, began) is Process.STOPPED
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert processes.state_of(sleeper.pid, began) is Process.GONE, "nobody has asked for its exit code yet"
    sleeper.wait()
    assert processes.state_of(sleeper.pid, began) is Process.GONE


def test_a_later_process_with_the_same_number_is_another_one() -> None:
    began = processes.began_at(OWN)
    assert began is not None
    assert processes.state_of(OWN, began) is Process.THERE
    assert processes.state_of(OWN, b"1" + began) is Process.GONE


def test_of_a_process_out_of_sight_nothing_is_said() -> None:
    assert processes.state_of(OWN, None) is Process.UNKNOWN


def test_the_line_of_python_is_that_of_the_user() -> None:
    frame = sys._getframe()
    expected = f"{__file__}:{frame.f_lineno + 1} in test_the_line_of_python_is_that_of_the_user"
    assert line_of(sys._getframe()) == expected
    assert line_of(frame, [str(Path(__file__).parents[1])]) != expected
    assert line_of(None) == ""


def test_a_rank_that_ended_is_read_after_its_process(of_two: Board) -> None:
    of_two.writer(1).does(board.prepare(State.ENDED, "starting"))
    lookout = Lookout(of_two, [processes.began_at(OWN), b"1"])
    assert [(one.process, one.line.state) for one in lookout.look(0.0)] == [
        (Process.THERE, State.RUNNING),
        (Process.GONE, State.ENDED),
    ]
