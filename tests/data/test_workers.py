"""A worker process that dies is expected where a batch is read, wherever the main process was when it died."""

import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sambasim.data.batches import batches_of, collate
from sambasim.data.datasets import WatchedDataset
from sambasim.errors import DataError
from tests.support.mpi import run_job

SAMPLES = 8


class Deadly(Dataset[Tensor]):
    """Of the third sample, which is asked for when the first batch is taken, the worker process dies."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        if index > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


def batches() -> Iterator[object]:
    watched = WatchedDataset(Deadly(), "pictures")
    loader: DataLoader[object] = DataLoader(watched, collate_fn=collate, num_workers=1)
    return batches_of(loader, "pictures")


def test_when_the_next_batch_is_read() -> None:
    reading = batches()
    next(reading)
    time.sleep(1.0)  # the death comes in here, where a handler of SIGCHLD could raise
    with pytest.raises(DataError, match=r"a worker process that reads pictures died") as caught:
        list(reading)
    assert str(caught.value.remedy).startswith("--workers 0 reads in the main process")


class Raising:
    """A loader whose batches cannot be had."""

    num_workers = 1

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> Iterator[object]:
        raise self.error
        yield


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_as_it_hands_a_batch_over(error: Exception) -> None:
    with pytest.raises(DataError, match=r"a worker process that reads pictures died"):
        list(batches_of(Raising(error), "pictures"))  # type: ignore[arg-type]  # what is used of a loader


SLOW = """
import time, torch
from torch.utils.data import DataLoader
from sambasim.data.batches import batches_of


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index > 1:
            time.sleep(60)
        return torch.tensor(index)


reading = batches_of(DataLoader(Slow(), num_workers=2), "pictures")
print(next(reading), flush=True)
raise SystemExit(0)
"""


def test_workers_ended_in_the_midst_of_a_sample_leave_no_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, temporary = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")  # sockets have short paths
    (folder / "slow.py").write_text(SLOW)
    run_job([sys.executable, "slow.py"], cwd=folder, env={"TMPDIR": str(temporary)}).check()
    assert list(temporary.iterdir()) == []
