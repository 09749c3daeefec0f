"""Batches from DataLoader worker processes. The death of one is raised when the next batch is read.

PyTorch's handler of SIGCHLD raises wherever the main process happens to be: in an operator, a collective or a
checkpoint, which then seem to have failed. Here the exception is kept until a batch is read.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.util import get_temp_dir
from types import FrameType
from typing import TypeVar

from torch.utils.data import DataLoader

from sambasim.data.batches import Batch
from sambasim.data.user_code import summary
from sambasim.errors import DataError

T = TypeVar("T")


def batches_of(loader: "DataLoader[object]", name: str) -> Iterator[Batch]:
    """`iter(loader)`; `name` is the data source's. Raises DataError, now or for any batch, if a worker process died."""
    return _Batches(loader, name) if loader.num_workers else iter(loader)


class _Batches:
    """The batches of a loader with worker processes."""

    def __init__(self, loader: "DataLoader[object]", name: str) -> None:
        self._name = name
        get_temp_dir()  # workers inherit it and this process deletes it; a killed worker would leave its own
        self._deaths = _deaths()
        self._deaths.kept = None  # of workers of an earlier loader
        self._batches: Iterator[Batch] = self._reading(lambda: iter(loader))
        self._deaths = _deaths()  # PyTorch sets its handler when the first worker starts

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return self._reading(self._batches.__next__)

    def _reading(self, read: Callable[[], T]) -> T:
        """The result of `read`. Raises DataError if a worker process died during it or before."""
        deaths = self._deaths
        try:
            deaths.are_raised = True
            try:
                kept, deaths.kept = deaths.kept, None
                if kept is not None:
                    raise kept
                return read()
            finally:
                deaths.are_raised = False
        except (RuntimeError, ConnectionError, EOFError) as raised:  # the last two if it died while it sent a batch
            if isinstance(raised, RuntimeError) and "DataLoader worker (pid" not in str(raised):
                raise
            raise DataError(
                f"a worker process that reads {self._name} died: {summary(raised)}",
                remedy="--workers 0 reads in the main process; check the free memory and the size of /dev/shm",
            ) from None


class _Deaths:
    """A handler of SIGCHLD that calls PyTorch's and keeps its exception, unless `are_raised`."""

    def __init__(self, pytorch_handler: Callable[[int, FrameType | None], object]) -> None:
        self._pytorch_handler = pytorch_handler
        self.kept: RuntimeError | None = None
        self.are_raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self._pytorch_handler(number, frame)
        except RuntimeError as death:
            if self.are_raised:
                raise
            self.kept = death


def _deaths() -> _Deaths:
    """The handler of this process, installed if it can be."""
    handler = signal.getsignal(signal.SIGCHLD)
    if isinstance(handler, _Deaths):
        return handler
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        return _Deaths(lambda number, frame: None)
    deaths = _Deaths(handler)
    signal.signal(signal.SIGCHLD, deaths)
    return deaths
