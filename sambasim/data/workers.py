"""Batches that worker processes read. One that died is told where the next batch is asked for.

PyTorch's handler of SIGCHLD raises wherever the main process happens to be: in an operator, a collective, a checkpoint,
which then seem to have failed. Here, what it raises waits until somebody reads.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.util import get_temp_dir
from types import FrameType
from typing import TypeVar

from torch.utils.data import DataLoader

from sambasim.data.batches import Batch
from sambasim.data.blame import summary
from sambasim.errors import DataError

T = TypeVar("T")


def batches_of(loader: "DataLoader[object]", name: str) -> Iterator[Batch]:
    """`iter(loader)`, which collates by `batches.collate`; `name` is the data source's. Raises DataError, now or for
    any batch, if a worker process died."""
    return _Batches(loader, name) if loader.num_workers else iter(loader)


class _Batches:
    """Those of a loader with worker processes."""

    def __init__(self, loader: "DataLoader[object]", name: str) -> None:
        self._name = name
        get_temp_dir()  # workers inherit the folder, and this process takes it away; their own would stay, being killed
        self._deaths = _deaths()
        self._deaths.heard = None  # of workers that nobody reads from any more
        self._batches: Iterator[Batch] = self._reading(lambda: iter(loader))
        self._deaths = _deaths()  # with the first workers of a process, PyTorch has set its handler just now

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self._reading(self._batches.__next__)

    def _reading(self, deed: Callable[[], T]) -> T:
        """What `deed` gives. Raises DataError if a worker process died in it, or before."""
        deaths = self._deaths
        try:
            deaths.are_raised = True
            try:
                heard, deaths.heard = deaths.heard, None
                if heard is not None:
                    raise heard
                return deed()
            finally:
                deaths.are_raised = False
        except (RuntimeError, ConnectionError, EOFError) as raised:  # the last two where it died handing a batch over
            if isinstance(raised, RuntimeError) and "DataLoader worker (pid" not in str(raised):
                raise
            raise DataError(
                f"a worker process that reads {self._name} died: {summary(raised)}",
                remedy="--workers 0 reads in the main process; look at the free memory and at the size of /dev/shm",
            ) from None


class _Deaths:
    """Hears of worker processes that died, in place of `pytorchs` handler and through it."""

    def __init__(self, pytorchs: Callable[[int, FrameType | None], object]) -> None:
        self._pytorchs = pytorchs
        self.heard: RuntimeError | None = None
        self.are_raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._pytorchs(number, frame)
        except RuntimeError as death:
            if self.are_raised:
                raise
            self.heard = death


def _deaths() -> _Deaths:
    """What hears of deaths in this process."""
    handler = signal.getsignal(signal.SIGCHLD)
    if isinstance(handler, _Deaths):
        return handler
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        return _Deaths(lambda number, frame: None)
    deaths = _Deaths(handler)
    signal.signal(signal.SIGCHLD, deaths)
    return deaths
