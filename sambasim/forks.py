"""Copies of this process: what they change ends with them, and so does a crash."""

import ctypes
import os
import pickle
import select
import signal
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from sambasim.errors import MachineError

T = TypeVar("T")

_HEAD = struct.Struct("<Q")
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_LONGEST_S = 120
"""A fresh copy that needs longer, as in a loop that never ends, has no result."""

_LONGEST_WAIT_S = 10.0
"""A copy that does nothing for so long waits for a thread that is not in it, and has no result."""

_POLL_S, _TRIFLE_S = 0.5, 0.05


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
        if sys.platform == "linux":  # elsewhere its next message fails, which ends it
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            live()
            status = 0
    finally:
        os._exit(status)


class Fork(Generic[T]):
    """A copy of the process as it is now, which answers by `work`: each time by a fresh copy of its own if `fresh`,
    else with what earlier answers have left. `prepare` is called in it first. It prints nothing."""

    def __init__(self, work: Callable[[Any], T], prepare: Callable[[], object], *, fresh: bool = True) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()

        def live() -> None:
            os.close(self._requests)
            os.close(self._answers)
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- until the end of the process
            prepare()
            while data := receive(requests):
                if fresh:
                    pid = forked(partial(_answer, work, data, answers, _LONGEST_S))
                    if os.waitpid(pid, 0)[1] != 0:
                        send(answers, b"")
                else:
                    _answer(work, data, answers)

        self._pid = forked(live)
        os.close(requests)
        os.close(answers)

    def begin(self, request: object) -> None:
        """Have it work on `request`, beside this process, until `end`."""
        with suppress(BrokenPipeError):  # it is gone, as `end` finds
            send(self._requests, pickle.dumps(request))

    def end(self) -> T | None:
        """What `work` has returned; None if it has raised, ended the process, or taken too long."""
        idle = Idle(self._pid)
        while not select.select([self._answers], [], [], _POLL_S)[0]:
            if idle.seconds() > _LONGEST_WAIT_S:
                for pid in (*children_of(self._pid),) or (self._pid,):
                    os.kill(pid, signal.SIGKILL)
        data = receive(self._answers)
        found: T | None = pickle.loads(data) if data else None
        return found

    def ask(self, request: object = None) -> T | None:
        self.begin(request)
        return self.end()

    def close(self) -> None:
        os.close(self._requests)
        os.close(self._answers)
        os.waitpid(self._pid, 0)


class Idle:
    """For how long a process and all that it has started have done nothing."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._worked_s = -1.0
        self._since_s = 0.0

    def seconds(self) -> float:
        worked_s, now_s = _worked_s(self._pid), time.monotonic()
        if worked_s > self._worked_s + _TRIFLE_S:
            self._worked_s, self._since_s = worked_s, now_s
        return now_s - self._since_s


def _worked_s(pid: int) -> float:
    """The processor time of a process and all that it has started; of one that cannot be seen, the time that passes."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    own_s = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # with those that have ended
    return own_s + sum(map(_worked_s, children_of(pid)))


def children_of(pid: int) -> Iterator[int]:
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            yield from map(int, file.read_text().split())


def _answer(work: Callable[[Any], object], data: bytes, answers: int, longest_s: int = 0) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(longest_s)
    try:
        found = pickle.dumps(work(pickle.loads(data)))
    except BaseException:  # of the user's code, which may end the process
        found = b""
    send(answers, found)


def send(pipe: int, data: bytes) -> None:
    whole = memoryview(_HEAD.pack(len(data)) + data)
    while whole:
        whole = whole[os.write(pipe, whole) :]


def receive(pipe: int) -> bytes:
    """What was sent; nothing once the other end is closed."""
    head = _read(pipe, _HEAD.size)
    return _read(pipe, _HEAD.unpack(head)[0]) if len(head) == _HEAD.size else b""


def _read(pipe: int, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count and (part := os.read(pipe, count - len(parts))):
        parts += part
    return bytes(parts)
