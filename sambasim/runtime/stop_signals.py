"""SIGTERM, SIGINT and SIGUSR1 ask a run to end after its step; a second one ends the process at once.

At once also where the main thread hears nothing, because it waits in MPI for a peer that will not come: a thread of its
own hears what the interpreter's handler in C writes down.

Schedulers send SIGTERM; Ctrl-C is SIGINT; SIGUSR1 is there because Open MPI's mpirun passes that on, and kills its
ranks half a second after any of the others. A signal reaches some ranks or all of them, so each tells the others beside
its loss: see `wish` in `sync.interface`.
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
"""The wish for a checkpoint."""

_STOP = 100
"""And that for an end, to which the number of the signal is added: an end comes before a checkpoint."""

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """Within its block, the first signal is noted, and `told` of it by name when somebody asks; a second one does what
    it does elsewhere.

    A rank that ends because another has got a signal may get its own later: that is noted behind the block too, for
    else it would die while it leaves. Outside of the main thread, which alone hears signals, nothing changes.
    """

    def __init__(self, told: Callable[[str], None]) -> None:
        self._told = told
        self._before: dict[signal.Signals, object] = {}
        self._second: _SecondSignal | None = None
        self._received = 0
        self._is_told = False

    def __enter__(self) -> "StopSignals":
        try:
            self._before = {number: signal.signal(number, self._hear) for number in _SIGNALS}
        except ValueError:  # another thread
            self._before = {}
        else:
            self._second = _SecondSignal()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._second is not None:
            self._second.close()
        if self._is_told and not self._received:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() gave is what it takes

    def wish(self) -> int:
        """What this rank wishes of the run: its end, or nothing."""
        if not self._received:
            return 0
        self.tell(self._received)  # not in the handler, which may have come in the midst of a line
        return _STOP + self._received

    def tell(self, number: int) -> None:
        """Tell of signal `number`, which this rank or another has got, if no signal was told of before."""
        if not self._is_told:
            self._is_told = True
            self._told(signal.Signals(number).name)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_DFL)


class _SecondSignal:
    """A thread that reads the number of each signal, which the interpreter's handler writes into a pipe, until `close`:
    the second of _SIGNALS ends the process."""

    def __init__(self) -> None:
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._writes, False)
        self._before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        _inherited.add(self._writes)
        self._thread = threading.Thread(target=self._read, name="second signal", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing is read any more."""
        signal.set_wakeup_fd(self._before)
        _inherited.discard(self._writes)
        os.close(self._writes)  # the thread reads an end, and goes

    def _read(self) -> None:
        heard = 0
        while numbers := os.read(self._reads, 64):
            for number in numbers:
                heard += number in _SIGNALS
                if heard > 1:
                    os._exit(128 + number)
        os.close(self._reads)


_inherited: set[int] = set()
"""Where signals of this process are written down. One that is forked off, to read data, writes its own nowhere: Ctrl-C
reaches it too."""


_masks = threading.local()


def _hold() -> None:
    """A signal that came in the child before `_forget` would be heard here, as a second one."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


def _let_come() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _forget() -> None:
    if _inherited:
        signal.set_wakeup_fd(-1)
        for descriptor in _inherited:
            os.close(descriptor)
        _inherited.clear()
    _let_come()


os.register_at_fork(before=_hold, after_in_parent=_let_come, after_in_child=_forget)


def signal_of(wished: int) -> int | None:
    """The number of the signal that a rank of the run has got, if one has."""
    return wished - _STOP if wished > _STOP else None


def interrupted(number: int, step: int, saved: Path | None, kept: str | None) -> Interrupted:
    """The end of a run that signal `number` has asked for. `saved` is the checkpoint after `step`; where that could not
    be written, `kept` says what there is. It is None for a run that writes none."""
    name = signal.Signals(number).name
    if saved is None and kept is None:
        what = f"{name}: the run has ended after step {step}, and nothing of it is saved"
        return Interrupted(number, what, remedy="--checkpoint-dir DIR saves where a run is, for --resume to go on from")
    if saved is None:
        what = f"{name}: the run has ended after step {step}, which could not be saved; {kept}"
        return Interrupted(
            number, what, remedy="see above why; the same command with --resume goes on from a checkpoint"
        )
    what = f"{name}: the run has ended after step {step}, which is saved as {saved}"
    return Interrupted(number, what, remedy="the same command with --resume goes on from there")
