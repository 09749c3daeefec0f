"""Data that comes in an order of its own: what replicas get of it, when its epochs end, and how a run resumes."""

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

import sambasim as ss
from sambasim.api.ranks import connected
from sambasim.data.datasets import WatchedDataset
from sambasim.errors import DataError, OptionError
from sambasim.runtime.run.streams import Dealt
from tests.api.conftest import LABELS, POINTS, TRAIN, compiled, eager, net, sgd, trained
from tests.support.mpi import run_mpi

Samples = Iterator[tuple[Tensor, Tensor]]
WHOLE = TensorDataset(POINTS, LABELS)
QUIETLY: dict[str, Any] = {"threads": 1, "quiet": True}


def rows() -> Samples:
    yield from zip(*TRAIN, strict=True)


class Rows(IterableDataset[Any]):
    def __init__(self, size: int = 320) -> None:
        self.size = size

    def __iter__(self) -> Samples:
        return zip(POINTS[: self.size], LABELS[: self.size], strict=True)


class Sized(Rows):
    def __len__(self) -> int:
        return self.size


class Split(Rows):
    """It gives each worker a part, the last one the smallest."""

    def __iter__(self) -> Samples:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return zip(POINTS[first : self.size : step], LABELS[first : self.size : step], strict=True)


class Stateful(Rows):
    """It has read some, and goes on from there; it moves with the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.epoch, self.read = 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Samples:
        while self.at < self.size:
            at, self.at = self.at, self.at + 1
            yield POINTS[at] + self.epoch, LABELS[at]
        self.at = 0


@pytest.mark.usefixtures("one_thread")
def test_one_replica_reads_what_plain_pytorch_reads(folder: Path) -> None:
    model = net()
    pef = compiled(folder, model, loss="cross_entropy", optimizer=sgd(model), name="one")
    loader = DataLoader(Rows(), 32, drop_last=True)
    wanted = eager(net_ := net(), sgd(net_), [tuple(batch) for _ in range(2) for batch in loader])
    for data in (loader, Rows(), rows, Split(), Sized()):
        assert ss.run(pef, data, steps=20, **QUIETLY).losses == wanted
    by_epochs = ss.run(pef, (Sized(), Rows(100)), epochs=2, **QUIETLY)
    assert by_epochs.losses == wanted
    assert [one.samples for one in by_epochs.evaluations] == [100, 100]
    whole = (POINTS[:100], LABELS[:100])
    assert (
        by_epochs.evaluations[-1].loss
        == ss.run(pef, (TRAIN, whole), epochs=2, set={"data.shuffle": False}, **QUIETLY).evaluations[-1].loss
    )
    assert ss.predict(pef, Rows(50)).loss == ss.predict(pef, (POINTS[:50], LABELS[:50])).loss
    assert ss.run(pef, rows, steps=20, workers=1, **QUIETLY).losses == wanted


def dealt(part: int) -> tuple[Tensor, Tensor]:
    """Batches of 32 in turn, as a data set in which a DistributedSampler finds them."""
    order = [
        at
        for start in range(0, part // 64 * 64, 64)
        for pair in zip(range(start, start + 32), range(start + 32, start + 64), strict=True)
        for at in pair
    ]
    return POINTS[order], LABELS[order]


@pytest.mark.parametrize("data", [rows, Rows(), DataLoader(Rows(), 32, num_workers=1)])
def test_replicas_take_the_batches_in_turn(pef: ss.Pef, data: Any) -> None:
    wanted = trained(pef, dealt(320), steps=5, threads=1, set={"data.shuffle": False})
    assert ss.run(pef, data, steps=5, **QUIETLY).losses == wanted.losses


def test_what_splits_itself_ends_for_all_where_it_ends_for_one(pef: ss.Pef) -> None:
    # 191 samples: replica 0 has 96 of them, three batches, and replica 1 has 95, which are two
    in_order = ss.run(pef, (POINTS[:128], LABELS[:128]), epochs=2, **QUIETLY, set={"data.shuffle": False})
    assert ss.run(pef, Split(191), steps=4, **QUIETLY).losses == in_order.losses


class Drawn(Rows):
    """It draws an order, and noise."""

    def __iter__(self) -> Samples:
        return ((POINTS[at] + torch.rand(()), LABELS[at]) for at in torch.randperm(self.size).tolist())


class Shuffled(Rows):
    """It draws an order from random numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(0)

    def __iter__(self) -> Samples:
        return ((POINTS[at], LABELS[at]) for at in self.random.sample(range(self.size), self.size))


class Noisy(Stateful):
    def __iter__(self) -> Samples:
        return ((point + torch.rand(()), label) for point, label in super().__iter__())


@pytest.mark.parametrize("make", [Stateful, Noisy, Drawn, Split, lambda: rows])
def test_a_run_goes_on_in_the_midst_of_a_stream(pef: ss.Pef, make: Callable[[], Any], tmp_path: Path) -> None:
    whole = ss.run(pef, make(), steps=9, **QUIETLY).losses
    data, saves = make(), {**QUIETLY, "checkpoint_dir": tmp_path / "ck"}
    begun = ss.run(pef, data, steps=3, **saves).losses
    assert begun + ss.run(pef, data, steps=9, resume="auto", **saves).losses == whole
    if make is Split:
        with pytest.raises(DataError, match="split for 2 replicas"):
            ss.run(pef, data, steps=4, resume=str(next((tmp_path / "ck").glob("*3"))), replicas=3, **QUIETLY)
        whole_then = Dealt(WatchedDataset(cast(Any, data), "it"), 0, 2, 32, seed=0)
        whole_then.begin(0, 32, [{"split": False, "state": None}])
        with pytest.raises(DataError, match="split for 1 replica"):
            raise cast(DataError, next(iter(whole_then))[0])


class Failing(Rows):
    def __iter__(self) -> Samples:
        yield POINTS[0], LABELS[0]
        raise ValueError("a shard is gone")


@pytest.mark.parametrize(
    ("data", "how", "text"),
    [
        (Rows(), {"epochs": 2}, "a stream without a length"),
        (Rows(), {"steps": 2, "workers": 2}, "is a stream, which 2 workers would read in another order"),
        (Rows(60), {"steps": 2}, "gives replica 0 of 2 no whole step in epoch 1"),
        (Failing(), {"steps": 2}, "sample 1 of the given data raised ValueError: a shard is gone"),
        (rows(), {"steps": 2}, "a generator function itself"),
        (Rows(), {"steps": 2, "set": {"data.evaluation_fraction": 0.1}}, "is a stream, and data.evaluation_fraction"),
    ],
)
def test_streams_that_cannot_be_trained_on_are_refused(pef: ss.Pef, data: Any, how: dict[str, Any], text: str) -> None:
    with pytest.raises((DataError, OptionError), match=text):
        ss.run(pef, data, **QUIETLY, **how)


def runs(pef: object) -> list[list[float]]:
    ways: list[tuple[Any, dict[str, Any]]] = [
        (Split(191), {"steps": 4}),
        (Shuffled(), {"steps": 4}),
        ((rows, Rows(77)), {"steps": 7, "reduce_on_rdu": True}),
        (DataLoader(Stateful(), 32, num_workers=1), {"steps": 7, "grad_accumulation_steps": 2}),
        (DataLoader(WHOLE, batch_sampler=cast(Any, Batches())), {"epochs": 2, "reduce_on_rdu": True}),
    ]
    done = [ss.run(cast(Any, pef), data, **QUIETLY, **how) for data, how in ways]
    return [[*run.losses, *(cast(float, one.loss) for one in run.evaluations)] for run in done]


class Batches:
    """Of global random numbers."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.randperm(400)[:384].view(-1, 32).tolist())


def test_ranks_of_mpirun_have_the_bits_of_an_emulation(pef: ss.Pef) -> None:
    done = run_mpi(2, ["python", "-m", "tests.api.test_streams", str(pef.path)]).check()
    assert json.loads(done.stdout) == runs(pef)


if __name__ == "__main__":
    found = runs(sys.argv[1])
    if connected().rank == 0:
        print(json.dumps(found))
