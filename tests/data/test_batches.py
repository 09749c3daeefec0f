"""From samples to what the PEF takes; and how a failure gets out of a worker process, which may die wherever the main
process is."""

import os
import signal
import sys
import time
from collections import OrderedDict, namedtuple
from collections.abc import Iterator, Sequence
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from sambasim.data.batches import Batch, bind, check, collate
from sambasim.data.datasets import WatchedDataset, tensor_batches
from sambasim.data.workers import batches_of, loader_of
from sambasim.errors import DataError
from sambasim.options.grammar import InputSpec
from sambasim.options.training import DataOptions
from tests.support.mpi import run_job

Sample = namedtuple("Sample", ["image", "label"])


class Fragile:
    """Its sample 5 cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if index == 5:
            raise ValueError("a truncated image")
        return torch.tensor(index)


class FragileTogether(Fragile):
    """Reads many at once, which fails where one at a time does."""

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    "samples",
    [
        [(torch.ones(3), 1), (torch.zeros(3), 2)],
        [Sample(torch.ones(3), 1), Sample(torch.zeros(3), 2)],
        [{"y": 1, "x": np.ones(3, np.float32)}, {"y": 2, "x": np.zeros(3, np.float32)}],
    ],
)
def test_samples_are_bound_by_position_or_by_name(samples: Sequence[object]) -> None:
    bound = bind(collate(samples), ["x", "y"])
    assert list(bound) == ["x", "y"]
    assert bound["x"].tolist() == [[1, 1, 1], [0, 0, 0]]
    assert bound["y"].tolist() == [1, 2]
    assert bound["y"].dtype is torch.int64


def test_what_samples_hold_reaches_the_model_in_plain_lists_and_dicts() -> None:
    batch = collate([{"pair": Sample(1, (2.0, OrderedDict(of=3)))}])
    assert repr(batch) == "{'pair': [tensor([1]), [tensor([2.]), {'of': tensor([3])}]]}"


def test_pythons_floats_are_narrowed_and_arrays_keep_their_width() -> None:
    bound = bind(collate([(0.1, np.float64(0.1), torch.zeros(1, dtype=torch.float64))] * 2), ["a", "b", "c"])
    assert [str(tensor.dtype) for tensor in bound.values()] == ["torch.float32", "torch.float64", "torch.float64"]
    assert torch.equal(bound["a"], torch.tensor([0.1, 0.1]))
    assert bind(collate([{"a": 0.5}, {"a": 1.5}]), ["a"])["a"].dtype is torch.float32
    assert bind(collate([0.5, 1.5]), ["a"])["a"].dtype is torch.float32


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([(torch.ones(2),) * 3], "a sample has 3 values, and the inputs are (x, y)"),
        ([{"x": 1, "label": 2}], "a sample has (x, label), and the inputs are (x, y)"),
        ([(torch.ones(2), "seven")], "what a sample gives for y is no tensor or number"),
        (
            [(torch.ones(2), 1), (torch.ones(3), 1)],
            "sample 1 of the batch gives float32[3] for value 0, and sample 0 of the batch gives float32[2]",
        ),
        ([(torch.ones(2), 1), (torch.ones(2), 2.0)], "sample 1 of the batch gives a float for value 1, and sample 0"),
        ([{"x": torch.ones(2).long(), "y": 1}, {"x": torch.ones(2), "y": 1}], "sample 1 of the batch gives float32[2]"),
        ([{"x": 1, "y": 2}, {"x": 1}], "sample 1 of the batch gives nothing for y, and sample 0"),
        ([(torch.ones(2), None)], "sample 0 of the batch gives None for value 1, which is no tensor or number"),
    ],
)
def test_samples_that_do_not_match_are_reported(samples: Sequence[object], text: str) -> None:
    with pytest.raises(DataError) as caught:
        bind(collate(samples), ["x", "y"])
    assert text in caught.value.what


def test_a_batch_is_checked_against_what_the_pef_takes() -> None:
    specs = [InputSpec("x", "float32", (3,)), InputSpec("y", "int64", ())]
    batch = {"x": torch.full((2, 3), 0.1, dtype=torch.float64), "y": torch.zeros(2, dtype=torch.int64)}
    checked = check(batch, specs, 2)
    assert checked["x"].dtype is torch.float32
    assert checked["y"] is batch["y"]
    narrower = [InputSpec("x", "bfloat16", (3,)), specs[1]]
    for given in (torch.float64, torch.float32):
        assert check({**batch, "x": batch["x"].to(given)}, narrower, 2)["x"].dtype is torch.bfloat16
    with pytest.raises(DataError, match=r"input x is float32\[2, 3\], and the PEF takes float32\[4, 3\]"):
        check(batch, specs, 4)
    wrong = {"x": batch["x"], "y": torch.zeros(2)}
    with pytest.raises(DataError, match=r"input y is float32\[2\], and the PEF takes int64\[2\]") as caught:
        check(wrong, specs, 2)
    assert caught.value.remedy == "make the samples fit, or compile again with this data"
    with pytest.raises(DataError, match=r"input x is float16\[2, 3\], and the PEF takes float32\[2, 3\]"):
        check({**batch, "x": torch.zeros(2, 3, dtype=torch.float16)}, specs, 2)


@pytest.mark.parametrize("dataset", [Fragile(), FragileTogether()])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_reported_with_file_line_and_index(dataset: Fragile, workers: int) -> None:
    watched = WatchedDataset(dataset, "pictures", chosen=[1, 3, 5, 7])
    loader: DataLoader[object] = DataLoader(watched, batch_size=2, collate_fn=collate, num_workers=workers)
    batches: Iterator[Batch] = iter(loader)
    assert bind(next(batches), ["x"])["x"].tolist() == [1, 3]
    with pytest.raises(DataError, match=r"^sample 5 of pictures raised ValueError: a truncated image") as caught:
        bind(next(batches), ["x"])
    where = str(caught.value.where)
    assert where.startswith(__file__)
    assert where.endswith('raise ValueError("a truncated image")')
    assert not list(batches)
    with pytest.raises(DataError, match=r"^sample 5 of pictures raised ValueError: a truncated image"):
        watched[2]


def test_a_sample_that_differs_is_called_by_its_index_in_the_users_dataset() -> None:
    held = [torch.ones(2 if index != 5 else 3) for index in range(8)]
    watched = WatchedDataset(held, "net.py:held", chosen=range(2, 8))
    loader: DataLoader[object] = DataLoader(watched, batch_size=4, collate_fn=collate)
    with pytest.raises(DataError) as caught:
        bind(next(iter(loader)), ["x"])
    assert caught.value.what == (
        "sample 5 of net.py:held gives float32[3] for its value, and sample 2 of net.py:held gives float32[2]"
    )
    assert "pad, crop or convert them in the dataset" in str(caught.value.remedy)


class Own(TensorDataset):
    """It may run code of its own."""


@pytest.mark.parametrize("ahead", [0, 3, 100])
def test_batches_are_those_of_samples_put_together(monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """However far ahead their rows are read, of a part of the dataset in another order."""
    dataset = TensorDataset(torch.randn(13, 3, 2, generator=torch.Generator().manual_seed(0)), torch.arange(13))
    chosen, order = [10, 3, 12, 5, 7, 0, 1, 2, 9, 4, 11], range(10, -1, -1)
    row_bytes = 3 * 2 * 4 + 8
    monkeypatch.setattr("sambasim.data.datasets._AHEAD_BYTES", ahead * 2 * row_bytes)
    fast = tensor_batches(WatchedDataset(dataset, "here", chosen))
    assert fast is not None
    batches = list(fast(order, 2))
    assert len(batches) == 5, "the last, which is not full, is left out"
    for number, batch in enumerate(batches):
        samples = [dataset[chosen[position]] for position in order[2 * number : 2 * number + 2]]
        for ours, theirs in zip(batch, default_collate(samples), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dtype is theirs.dtype


def test_a_subclass_of_a_tensor_dataset_is_read_by_its_own_code() -> None:
    assert tensor_batches(WatchedDataset(Own(torch.zeros(4, 2)), "here")) is None
    assert tensor_batches(WatchedDataset([torch.zeros(2)] * 4, "here")) is None


class Deadly(Dataset[Tensor]):
    """Of the third sample, which is asked for when the first batch is taken, the worker process dies."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if index > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


def test_when_the_next_batch_is_read() -> None:
    dataset, each = WatchedDataset(Deadly(), "pictures"), [[number] for number in range(8)]
    reading = batches_of(loader_of(dataset, each, DataOptions(workers=1), None), "pictures")
    next(reading)
    time.sleep(1.0)  # the death comes in here, where a handler of SIGCHLD could raise
    with pytest.raises(DataError, match=r"a worker process that reads pictures died") as caught:
        list(reading)
    assert str(caught.value.remedy).startswith("--workers 0 reads in the main process")


def failing(error: Exception) -> Iterator[object]:
    raise error
    yield


@pytest.mark.parametrize("error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()])
def test_as_it_hands_a_batch_over(error: Exception) -> None:
    loader = MagicMock(num_workers=1)
    loader.__iter__.return_value = failing(error)
    with pytest.raises(DataError, match=r"a worker process that reads pictures died"):
        list(batches_of(loader, "pictures"))


SLOW = """
import time, torch
from sambasim.data.workers import batches_of, loader_of
from sambasim.options.training import DataOptions


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index > 1:
            time.sleep(60)
        return torch.tensor(index)


each = [[number] for number in range(8)]
reading = batches_of(loader_of(Slow(), each, DataOptions(workers=2), None), "pictures")
print(next(reading), flush=True)
raise SystemExit(0)
"""


def test_workers_ended_in_the_midst_of_a_sample_leave_no_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, temporary = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")  # sockets have short paths
    (folder / "slow.py").write_text(SLOW)
    run_job([sys.executable, "slow.py"], cwd=folder, env={"TMPDIR": str(temporary)}).check()
    assert list(temporary.iterdir()) == []


_OF_EACH_KIND = {
    "whole numbers": torch.arange(6).reshape(2, 3),
    "not contiguous": torch.randn(4, 3).t(),
    "bfloat16": torch.randn(5).bfloat16(),
    "truth": torch.tensor([True, False]),
    "one": torch.tensor(2.5),
    "none": torch.zeros(0, 3),
    "complex": torch.randn(3, dtype=torch.complex64),
    "large": torch.randn(1024, 1024),
}


def _all_kinds(samples: list[object]) -> object:
    return {"in a tuple": (dict(_OF_EACH_KIND), [_OF_EACH_KIND["one"]] * 2), "text": ["a", "b"]}


def test_a_worker_sends_each_kind_of_tensor_as_it_is() -> None:
    watched = WatchedDataset([1, 2], "numbers", collate=_all_kinds)
    loader = loader_of(watched, [[0, 1]], DataOptions(source="digits", workers=1), None, watched)
    (batch,) = batches_of(loader, "numbers")
    assert isinstance(batch, dict)
    assert batch["text"] == ["a", "b"]
    given, twice = batch["in a tuple"]
    for name, tensor in _OF_EACH_KIND.items():
        assert given[name].dtype is tensor.dtype
        assert torch.equal(given[name], tensor), name
    assert list(map(float, twice)) == [2.5, 2.5]
    given["bfloat16"] += 1  # it can be written
