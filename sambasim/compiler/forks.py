"""Work in a forked copy of this process, from which only the result comes back: what it changes is gone with it."""

import os
import pickle
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

_LONGEST_S = 120
"""A copy that needs longer, as in a loop that never ends, has no result."""


class Fork(Generic[T]):
    """The process as it is now: each `ask` is answered by a copy of it of its own."""

    def __init__(self, work: Callable[[Any], T]) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._requests)
            os.close(self._answers)
            _serve(work, requests, answers)
        os.close(requests)
        os.close(answers)

    def ask(self, request: object = None) -> T | None:
        """What `work` returns for `request`; None if it raises, ends the process, or takes too long."""
        _send(self._requests, pickle.dumps(request))
        data = _receive(self._answers)
        found: T | None = pickle.loads(data) if data else None
        return found

    def close(self) -> None:
        os.close(self._requests)
        os.close(self._answers)
        os.waitpid(self._pid, 0)


def _serve(work: Callable[[Any], T], requests: int, answers: int) -> None:
    """The life of the waiting copy."""
    try:
        while data := _receive(requests):
            pid = os.fork()
            if pid == 0:
                _answer(work, data, answers)
            if os.waitpid(pid, 0)[1] != 0:
                _send(answers, b"")
    finally:
        os._exit(0)


def _answer(work: Callable[[Any], T], request: bytes, answers: int) -> None:
    status = 1
    try:
        torch.set_num_threads(1)  # the other threads of OpenMP are not in the copy
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_LONGEST_S)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 -- until the end of the process
        _send(answers, pickle.dumps(work(pickle.loads(request))))
        status = 0
    finally:
        os._exit(status)


def _send(pipe: int, data: bytes) -> None:
    whole = memoryview(struct.pack("Q", len(data)) + data)
    while whole:
        whole = whole[os.write(pipe, whole) :]


def _receive(pipe: int) -> bytes:
    """What was sent; nothing once the other end is closed."""
    head = _read(pipe, struct.calcsize("Q"))
    return _read(pipe, struct.unpack("Q", head)[0]) if head else b""


def _read(pipe: int, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count and (part := os.read(pipe, count - len(parts))):
        parts += part
    return bytes(parts)
