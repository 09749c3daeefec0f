"""A worker process that died, told where a batch is read.

PyTorch's handler of SIGCHLD raises wherever the main process happens to be: in an operator, a collective, a checkpoint,
which then seem to have failed. Here, what it raises waits until the next batch is asked for.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from sambasim.data.blame import summary
from sambasim.errors import DataError


class _Deaths:
    """Hears of worker processes that died, in place of `pytorchs` handler and through it."""

    def __init__(self, pytorchs: Callable[[int, FrameType | None], object]) -> None:
        self._pytorchs = pytorchs
        self._heard: RuntimeError | None = None
        self._is_reading = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._pytorchs(number, frame)
        except RuntimeError as death:
            if self._is_reading:
                raise
            self._heard = death

    @contextmanager
    def raised_here(self) -> Iterator[None]:
        """Raises a death that was heard of before, and lets one be raised in the block."""
        try:
            self._is_reading = True
            heard, self._heard = self._heard, None
            if heard is not None:
                raise heard
            yield
        finally:
            self._is_reading = False


@contextmanager
def reading_batch(name: str) -> Iterator[None]:
    """Around `next(batches)`: a worker process that died, now or before, becomes a DataError; `name` is the data
    source's."""
    try:
        with _deaths().raised_here():
            yield
    except (RuntimeError, ConnectionError, EOFError) as raised:  # the last two where it died as it handed a batch over
        if isinstance(raised, RuntimeError) and "DataLoader worker" not in str(raised):
            raise
        raise DataError(
            f"a worker process that reads {name} died: {summary(raised)}",
            remedy="--workers 0 reads in the main process; look at the free memory and at the size of /dev/shm",
        ) from None


def _deaths() -> _Deaths:
    """What hears of deaths in this process. PyTorch sets its handler when it first starts worker processes."""
    handler = signal.getsignal(signal.SIGCHLD)
    if isinstance(handler, _Deaths):
        return handler
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        return _Deaths(lambda number, frame: None)
    deaths = _Deaths(handler)
    signal.signal(signal.SIGCHLD, deaths)
    return deaths
