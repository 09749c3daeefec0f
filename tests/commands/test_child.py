"""Work in a child: what it gives back, what it prints, how it may end, and what is left of it."""

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sambasim.commands.child import OnPhase, in_child
from sambasim.errors import CaptureError, InternalError, InvariantError, ModelError, SambasimError


def test_a_result_comes_back_and_nothing_else_changes() -> None:
    counts: list[int] = []

    def work(on_phase: OnPhase) -> tuple[int, torch.Tensor]:
        counts.append(1)
        torch.manual_seed(99)
        random.random()
        os.environ["SAMBASIM_OF_A_CHILD"] = "1"
        return torch.get_num_threads(), torch.arange(3)

    states, descriptors = (torch.get_rng_state(), random.getstate()), set(os.listdir("/proc/self/fd"))
    threads, tensor = in_child(work)
    assert (threads, tensor.tolist()) == (1, [0, 1, 2])
    assert counts == []
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert "SAMBASIM_OF_A_CHILD" not in os.environ
    assert set(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(ChildProcessError):  # no zombie
        os.waitpid(-1, os.WNOHANG)


def test_phases_and_output_arrive_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    def work(on_phase: OnPhase) -> None:
        on_phase("one")
        print("from Python")
        on_phase("two")
        sys.stderr.write("an error\n")
        os.write(1, b"from C\n")

    in_child(work, lambda phase: print(f"phase {phase}"))
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if line != "from C"] == ["phase one", "from Python", "phase two"]
    assert "from C" in out
    assert err == "an error\n"


def test_a_child_of_a_child_works_and_what_the_parent_has_not_written_yet_is_written_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def inner(on_phase: OnPhase) -> int:
        print("deep")
        on_phase("inner")
        return 5

    phases: list[str] = []
    with (tmp_path / "log").open("w") as file:
        file.write("once")
        assert in_child(lambda on_phase: in_child(inner, on_phase), phases.append) == 5
    assert (phases, capsys.readouterr().out, (tmp_path / "log").read_text()) == (["inner"], "deep\n", "once")


class _LocalError(ModelError):
    """An error that its own arguments do not make again."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}", where="net.py:1", remedy="none")


@pytest.mark.parametrize("error", [InvariantError(3, "is broken"), _LocalError(1, 2)])
def test_errors_of_ours_come_back_as_they_are(error: SambasimError) -> None:
    def fail(on_phase: OnPhase) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        in_child(fail)
    assert str(caught.value) == str(error)
    notes = getattr(caught.value, "__notes__", [])
    assert ["in fail" in note for note in notes] == [True] * isinstance(error, InternalError), "others say all"


def test_an_unexpected_exception_has_the_users_line() -> None:
    with pytest.raises(CaptureError) as caught:
        in_child(lambda on_phase: torch.ones(2).view(3))
    assert "RuntimeError: shape '[3]' is invalid" in caught.value.what
    assert (caught.value.where or "").startswith(__file__)


def test_a_result_that_cannot_be_sent_is_an_error_of_ours() -> None:
    with pytest.raises(InternalError, match="pickle"):
        in_child(lambda on_phase: lambda: 1)


def _segfault(on_phase: OnPhase) -> None:
    on_phase("capture the training step")
    ctypes.string_at(0)


ENDS: dict[Callable[[OnPhase], object], str] = {
    _segfault: "PyTorch crashed in the phase “capture the training step”: SIGSEGV",
    lambda on_phase: os.abort(): "PyTorch crashed: SIGABRT",
    lambda on_phase: os.kill(os.getpid(), signal.SIGKILL): "too little memory",
    lambda on_phase: os._exit(3): "the model ended the process, with exit code 3",
}


@pytest.mark.parametrize("work", ENDS)
def test_a_child_that_ends_without_a_word_is_an_error(work: Callable[[OnPhase], object]) -> None:
    with pytest.raises(CaptureError) as caught:
        in_child(work)
    assert ENDS[work] in caught.value.what
    if "SIG" in ENDS[work]:
        assert (caught.value.where or "").startswith(f"{__file__}:")


_SLEEPS = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
from sambasim.commands.child import in_child
def work(on_phase):
    on_phase(str(os.getpid()))
    time.sleep(100)
try:
    in_child(work, lambda pid: print(pid, flush=True))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_both(end: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _SLEEPS], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(end)
    rest = parent.communicate(timeout=60)[0]
    assert rest == ("interrupted\n" if end is signal.SIGINT else "")
    deadline_s = time.monotonic() + 60
    while Path(f"/proc/{child}/status").exists() and "Z (zombie)" not in Path(f"/proc/{child}/status").read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_what_waits_for_a_thread_of_its_parent_ends_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sambasim.commands.child._LONGEST_WAIT_S", 2.0)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        with pytest.raises(CaptureError, match="the model waits for another thread") as caught:
            in_child(lambda on_phase: pool.submit(int).result())
    assert "pool.submit(int).result()" in str(caught.value.where)
