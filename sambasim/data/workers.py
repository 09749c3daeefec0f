"""Processes that read batches ahead: they outlive requests to stop, which launchers send to every process of a job, and
end with the process that reads them."""

import multiprocessing.context
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.popen_fork import Popen
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import get_temp_dir
from typing import Any

import torch
from torch import Generator, Tensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import DataLoader, Dataset

from sambasim.data.batches import Batch, collate
from sambasim.data.datasets import WatchedDataset
from sambasim.data.user_code import guarded, summary
from sambasim.errors import DataError
from sambasim.forks import STOP_SIGNALS, ends_with
from sambasim.options.training import DataOptions

_MESSAGE_BYTES = 512 * 1024


class _Popen(Popen):
    def terminate(self) -> None:  # by DataLoader and multiprocessing at shutdown; workers ignore SIGTERM
        self.kill()


class _Process(multiprocessing.context.ForkProcess):
    @staticmethod
    def _Popen(process: Any) -> Popen:
        return _Popen(process)


class _Context(multiprocessing.context.ForkContext):
    Process = _Process


def loader_of(
    dataset: Dataset[Any],
    sampler: Iterable[list[int]] | None,
    options: DataOptions,
    generator: Generator | None,
    watched: WatchedDataset | None = None,
) -> "DataLoader[object]":
    """Reads the batches that `sampler` gives, as `watched` makes them, or those of a stream; workers are seeded from
    `generator`. A loader of the user's says how, unless the options ask for workers."""
    user, made = (None, None) if watched is None else (watched.loader, watched.collate)
    if user is not None and user.num_workers and not options.workers:
        names = {"prefetch_factor": user.prefetch_factor, "persistent_workers": user.persistent_workers}
        options = options.model_copy(update={"workers": user.num_workers, **names})
    parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
    return DataLoader(
        dataset,
        batch_size=None if sampler is None else 1,
        batch_sampler=sampler,
        collate_fn=_of_stream if sampler is None else partial(_of_samples, partial(collate, function=made)),
        num_workers=options.workers,
        multiprocessing_context=_Context() if options.workers else None,
        worker_init_fn=partial(_begin, parent, None if user is None else user.worker_init_fn),
        prefetch_factor=options.prefetch_factor,
        persistent_workers=options.persistent_workers and sampler is not None,
        generator=generator,
    )


def _begin(parent: int | None, init: Callable[[int], object] | None, number: int) -> None:
    """In a worker, whose stop signals are blocked: it ignores them from now on; programs that it starts do not. With a
    `parent`, whose main thread has started it, it is killed at the end of that."""
    if parent is not None and not ends_with(parent):
        os._exit(1)
    ForkingPickler.register(Tensor, _for_message)
    for one in STOP_SIGNALS:
        signal.signal(one, lambda received, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if init is not None:
        try:
            guarded(partial(init, number), "worker_init_fn of the DataLoader", DataError)
        except DataError as error:  # raised here, it would reach the parent as a text
            _failed.append(error)


def _for_message(tensor: Tensor) -> tuple[Any, ...]:
    """The pickled form: to open shared memory, as torch's does, takes as long as to read `_MESSAGE_BYTES`."""
    is_plain = tensor.layout is torch.strided and not tensor.requires_grad and not tensor.is_complex()
    if not is_plain or tensor.nbytes > _MESSAGE_BYTES:
        return reduce_tensor(tensor)  # type: ignore[no-any-return, no-untyped-call]  # torch gives it no types
    return _received, (tensor.contiguous().view(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape)


def _received(array: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.from_numpy(array).view(dtype).view(shape)


_failed: list[DataError] = []  # in this worker


def _of_samples(make: Callable[[list[Any]], object], samples: list[Any]) -> object:
    return _failed[0] if _failed else make(samples)


def _of_stream(batch: object) -> object:
    return (_failed[0], {}) if _failed else batch


def batches_of(loader: "DataLoader[object]", name: str) -> Iterator[Batch]:
    """`iter(loader)`; `name` is the data source's. A batch raises DataError if a worker process died."""
    if not loader.num_workers:
        make, read = loader.collate_fn, getattr(loader.dataset, "__getitems__", None)
        # What DataLoader does for a batch takes as long as to make a small one.
        return iter(loader) if read is None else (make(read(draw)) for draw in loader.batch_sampler or ())
    get_temp_dir()  # workers inherit it and this process deletes it; a killed worker would leave its own
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # workers inherit it
    try:
        batches = iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if threading.current_thread() is threading.main_thread():
        # PyTorch's handler would raise wherever this process is, as in a collective. Reading finds the death as well.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return _of_workers(batches, name)


def _of_workers(batches: Iterator[Batch], name: str) -> Iterator[Batch]:
    try:
        yield from batches
    except (RuntimeError, ConnectionError, EOFError) as raised:  # the last two if it died while it sent a batch
        if isinstance(raised, RuntimeError) and "DataLoader worker (pid" not in str(raised):
            raise
        remedy = "--workers 0 reads in the main process; check the free memory and the size of /dev/shm"
        raise DataError(f"a worker process that reads {name} died: {summary(raised)}", remedy=remedy) from None
