"""SIGTERM, SIGINT and SIGUSR1 ask a run to stop after its step; a second one ends the process at once.

Schedulers send SIGTERM; Ctrl-C is SIGINT; SIGUSR1 is there because Open MPI's mpirun forwards it, and kills its ranks
half a second after any of the others. A signal may reach only some ranks, so each sends its request with its loss.
"""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final

from sambasim.errors import Interrupted

SAVE: Final = 1
"""The request for a checkpoint; a request to stop is larger. The largest request of all ranks counts."""

_STOP = 100  # plus the number of the signal
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_wakeup_fds: set[int] = set()
_masks = threading.local()


class StopSignals:
    """Within its block, in the main thread, the first signal is passed to `notify`, and a second ends the process: by a
    thread that reads the pipe of the interpreter's handler, because a wait in MPI runs no Python handler."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._handlers: dict[signal.Signals, object] = {}
        self._received = 0
        self._is_reported = False

    def __enter__(self) -> "StopSignals":
        try:
            self._handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        except ValueError:  # not the main thread
            return self
        reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._wakeup_fd = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        _wakeup_fds.add(self._writes)
        threading.Thread(target=_exit_at_second, args=(reads,), name="second signal", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._handlers:
            return
        signal.set_wakeup_fd(self._wakeup_fd)
        _wakeup_fds.discard(self._writes)
        os.close(self._writes)  # ends the thread
        if self._is_reported and not self._received:
            return  # another rank was signalled: the signal to this one may still come, and must not kill it
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() returned is what it takes

    def request(self) -> int:
        if self._received:
            self.report(self._received)  # not in the handler, which may interrupt a print
        return self._received and _STOP + self._received

    def report(self, number: int) -> None:
        """Notify of signal `number`, received by this rank or another, unless one was reported before."""
        if not self._is_reported:
            self._is_reported = True
            self._notify(signal.Signals(number).name)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        for handled in _SIGNALS:
            signal.signal(handled, signal.SIG_DFL)


def _exit_at_second(pipe: int) -> None:
    received = 0
    while numbers := os.read(pipe, 64):
        for number in numbers:
            received += number in _SIGNALS
            if received > 1:
                os._exit(128 + number)
    os.close(pipe)


# A forked process, such as a data worker, must not write to the pipe of its parent: Ctrl-C reaches both, and would
# count twice. Signals are blocked until its end of the pipe is closed.


def _block() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _close_and_unblock() -> None:
    if _wakeup_fds:
        signal.set_wakeup_fd(-1)
    while _wakeup_fds:
        os.close(_wakeup_fds.pop())
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_close_and_unblock)


def signal_of(request: int) -> int | None:
    """The number of the signal in a request to stop; None in another request."""
    return request - _STOP if request > _STOP else None


def interrupted(number: int, step: int, saved: Path | None, kept: str | None) -> Interrupted:
    """The error after signal `number`. `saved`: the checkpoint of `step`, if any; `kept`: older ones; None if the run
    saves none."""
    if saved is not None:
        clause, remedy = f"which is saved as {saved}", "the same command with --resume continues from there"
    elif kept is not None:
        clause = f"which could not be saved; {kept}"
        remedy = "see above why; the same command with --resume continues from a checkpoint"
    else:
        clause = "and nothing of it is saved"
        remedy = "--checkpoint-dir DIR saves checkpoints, from which --resume continues"
    what = f"{signal.Signals(number).name}: the run has ended after step {step}, {clause}"
    return Interrupted(number, what, remedy=remedy)
