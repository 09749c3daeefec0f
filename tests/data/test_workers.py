"""A worker process that dies is told where a batch is read, wherever the main process was when it died."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sambasim.data.batches import collate
from sambasim.data.samples import WatchedDataset
from sambasim.data.workers import reading_batch
from sambasim.errors import DataError

SAMPLES = 8


class Deadly(Dataset[Tensor]):
    """Of the third sample, which is asked for when the first batch is taken, the worker process dies."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        if index > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


@pytest.fixture
def batches() -> Iterator[Iterator[object]]:
    loader: DataLoader[object] = DataLoader(WatchedDataset(Deadly(), "pictures"), collate_fn=collate, num_workers=1)
    yield iter(loader)
    with suppress(DataError), reading_batch("pictures"):  # what is heard after the test is not of the next one
        time.sleep(0.2)


def read_on(batches: Iterator[object]) -> None:
    for _ in range(SAMPLES):
        with reading_batch("pictures"):
            next(batches)


def test_while_a_batch_is_waited_for(batches: Iterator[object]) -> None:
    with pytest.raises(DataError, match=r"a worker process that reads pictures died") as caught:
        read_on(batches)
    assert caught.value.remedy is not None
    assert caught.value.remedy.startswith("--workers 0 reads in the main process")


def test_while_something_else_is_under_way(batches: Iterator[object]) -> None:
    with reading_batch("pictures"):
        next(batches)
    until = time.monotonic() + 1.0
    while time.monotonic() < until:  # the death comes in here, where a signal's handler may raise at any line
        sum(range(1000))
    with pytest.raises(DataError, match=r"pictures died: .*is killed by signal: Killed"):
        read_on(batches)


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_as_it_hands_a_batch_over(error: Exception) -> None:
    with pytest.raises(DataError, match=r"a worker process that reads pictures died"), reading_batch("pictures"):
        raise error


def test_other_errors_around_a_batch_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"ours"), reading_batch("pictures"):
        raise RuntimeError("ours")
