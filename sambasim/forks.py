"""Copies of this process, the mechanism: what they change ends with them, and so does a crash. `commands/child.py` also
forwards what a copy prints, and words its errors. And other commands, `ran` to their end."""

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

from sambasim.errors import InternalError, MachineError

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Each asks a run to stop after its step."""

_PR_SET_PDEATHSIG = 1  # of prctl(2)
_LONGEST_S = 120  # A fresh copy that needs longer, as in a loop that never ends, has no result
_LONGEST_WAIT_S = 10.0  # A copy that does nothing for so long waits for a thread that is not in it, and has no result
_POLL_S, _TRIFLE_S = 0.5, 0.05


def ran(*command: str, longest_s: float = 60.0) -> tuple[str | None, str]:
    """What a command prints, None if it fails, and its last line, or why it could not start or has not ended."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=longest_s)
    except subprocess.TimeoutExpired:
        return None, f"{command[0]} did not end within {longest_s:.0f} s"
    except OSError as error:
        return None, str(error)
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    last = lines[-1].strip() if lines else f"exit code {done.returncode}"
    return None if done.returncode else done.stdout, last


def forked(live: Callable[[], object]) -> int:
    """The id of a copy of this process, which calls `live` and ends: without handlers of `atexit`, without flushing
    files of its parent, and with its parent. Raises MachineError if the system gives no other process."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # or the copy would have it too
    parent = os.getpid()
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):  # of threads, which have no part
            pid = os.fork()
    except OSError as error:
        what = f"this machine gives no other process: {error.strerror}"
        raise MachineError(what, remedy="free some memory, or raise `ulimit -u`") from error
    if pid:
        return pid
    status = 1
    try:
        if ends_with(parent):
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            live()
            status = 0
    finally:
        os._exit(status)


def ends_with(parent: int) -> bool:
    """From now on this process is killed when the thread of `parent` that forked it ends; False if `parent` has."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


class Fork(Generic[T]):
    """A copy of the process as it is now, which answers by `work`, each time in a fresh copy of its own. `prepare` is
    called in it first. It prints nothing."""

    def __init__(self, work: Callable[[Any], T], prepare: Callable[[], object]) -> None:
        self._pipe, pipe = Pipe()
        self._is_gone = False  # it has ended, and answers nothing

        def live() -> None:
            self._pipe.close()
            silent = os.open(os.devnull, os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(silent, stream)
            sys.stdout = sys.stderr = os.fdopen(silent, "w")
            prepare()
            with suppress(EOFError):
                while True:
                    request = pipe.recv_bytes()
                    if os.waitpid(forked(partial(_answer, work, request, pipe)), 0)[1] != 0:
                        pipe.send_bytes(b"")

        try:
            self._pid = forked(live)
        finally:
            pipe.close()

    def begin(self, request: object) -> None:
        """Have it work on `request`, beside this process, until `end`."""
        with suppress(BrokenPipeError):  # it is gone, as `end` finds
            self._pipe.send_bytes(pickle.dumps(request))

    def end(self) -> T | None:
        """What `work` has returned; None if it raised, ended the process or took too long. Raises its InternalError."""
        idle = Idle(self._pid)
        while not self._pipe.poll(_POLL_S):
            self._is_gone = self._is_gone or os.waitpid(self._pid, os.WNOHANG)[0] != 0
            if self._is_gone:  # and something that it has started holds its pipe open
                break
            if idle.seconds() > _LONGEST_WAIT_S:
                for pid in children_of(self._pid):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        if not self._pipe.poll():
            return None
        try:
            data = self._pipe.recv_bytes()
        except (EOFError, OSError):  # it has ended, perhaps within its answer
            self._is_gone = True
            return None
        answer: T | InternalError | None = pickle.loads(data) if data else None
        if isinstance(answer, InternalError):
            raise answer
        return answer

    def ask(self, request: object = None) -> T | None:
        self.begin(request)
        return self.end()

    def close(self) -> None:
        self._pipe.close()
        with suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


class Idle:
    """For how long a process and all that it has started have done nothing but wait, as far as anyone has looked."""

    def __init__(self, pid: int) -> None:
        self._pid, self._worked_s, self._idle_s = pid, -1.0, 0.0
        self._looked_s = time.monotonic()

    def seconds(self) -> float:
        """To be asked about every `_POLL_S`; what passes between two looks counts for no more, as when all is stopped
        from the keyboard."""
        now_s = time.monotonic()
        passed_s, self._looked_s = min(now_s - self._looked_s, 2 * _POLL_S), now_s
        worked_s = _worked_s(self._pid)
        is_idle = worked_s is not None and abs(worked_s - self._worked_s) < _TRIFLE_S
        self._idle_s = self._idle_s + passed_s if is_idle else 0.0
        if not is_idle:
            self._worked_s = -1.0 if worked_s is None else worked_s
        return self._idle_s


def _worked_s(pid: int) -> float | None:
    """The processor time of a process and all that it has started; None if one does anything else than to wait, such as
    writing to a disk, or cannot be seen."""
    fields = stat_of(pid)
    if fields is None:
        return None
    total_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # with children that have ended
    for child in children_of(pid):
        if fields[0] != b"S" or (worked_s := _worked_s(child)) is None:
            return None
        total_s += worked_s
    return total_s if fields[0] == b"S" else None


def stat_of(pid: int | str) -> list[bytes] | None:
    """The fields of a process in /proc, from its state on; None if it cannot be seen."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None


def children_of(pid: int) -> Iterator[int]:
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, file.read_text().split())


def _answer(work: Callable[[Any], object], request: bytes, pipe: "Connection[Any, Any]") -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LONGEST_S)
    try:
        answer = pickle.dumps(work(pickle.loads(request)))
    except InternalError as error:
        answer = pickle.dumps(error)
    except BaseException:  # of the user's code, which may end the process
        answer = b""
    pipe.send_bytes(answer)
