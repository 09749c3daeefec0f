"""Data as scripts have them: collate functions, columns that nobody takes, loaders with samplers."""

from collections.abc import Callable, Iterator, Mapping
from multiprocessing import active_children
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import sambasim as ss
from sambasim.errors import DataError
from tests.api.conftest import HELD_OUT, LABELS, POINTS, TRAIN, compiled, eager, net, sgd, trained

SIZE = 8
WHOLE = TensorDataset(POINTS, LABELS)
ORDERED: dict[str, Any] = {"threads": 1, "set": {"data.shuffle": False}}


@pytest.fixture(scope="module")
def one(folder: Path) -> ss.Pef:
    model = net()
    example = {"input": POINTS[:SIZE], "target": LABELS[:SIZE]}
    return compiled(folder, model, example, loss="cross_entropy", optimizer=sgd(model), name="one")


def ragged(index: int) -> dict[str, Any]:
    """Of any length and type; a text that nobody takes."""
    points = [POINTS[index].tolist()] * (1 + index % 3)
    return {"points": points, "label": str(int(LABELS[index])), "text": "cat" * index}


def means(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Pads, and gives means of what was there."""
    padded = pad_sequence([torch.tensor(one["points"]) for one in samples], batch_first=True)
    count = torch.tensor([[len(one["points"])] for one in samples])
    target = torch.tensor([int(one["label"]) for one in samples])
    return {"input": padded.sum(1) / count, "target": target, "text": [one["text"] for one in samples]}


RAGGED = [ragged(index) for index in range(40)]


def in_pytorch(batches: list[Any], collate: Callable[[list[Any]], Mapping[str, Tensor]] = means) -> list[float]:
    """The losses of plain PyTorch."""
    model = net()
    return eager(model, sgd(model), [(one["input"], one["target"]) for one in map(collate, batches)])


@pytest.mark.usefixtures("one_thread")
def test_a_function_makes_batches_of_samples_of_any_kind(one: ss.Pef, capfd: pytest.CaptureFixture[str]) -> None:
    wanted = in_pytorch([RAGGED[start : start + SIZE] for start in range(0, 32, SIZE)])
    by_name = {**ORDERED, "set": {"data.shuffle": False, "data.collate": f"{__name__}:means"}}
    for how in ({**ORDERED, "collate_fn": means}, by_name, {**ORDERED, "collate_fn": f"{__name__}:means"}):
        assert trained(one, (RAGGED, RAGGED[:5]), **how).losses == wanted
    ss.run(one, RAGGED, steps=2, collate_fn=means, workers=1)
    assert active_children() == [], "of a run that has ended"
    assert capfd.readouterr().out.count("columns that the PEF does not take are dropped: text") == 1
    whole = ss.predict(one, RAGGED[:13], collate_fn=means)
    assert whole.loss == pytest.approx(ss.predict(one, (POINTS[:13], LABELS[:13])).loss)


def test_an_example_is_made_of_samples(folder: Path) -> None:
    pef = compiled(folder, net(), RAGGED[:SIZE], loss="cross_entropy", collate_fn=f"{__name__}:means", name="by_name")
    assert pef.document.data_source["collate"] == f"{__name__}:means"
    assert "neither forward() nor the loss takes are dropped: text" in pef.notices[0]


@pytest.mark.parametrize(
    ("data", "how", "text"),
    [
        (RAGGED, {"collate_fn": lambda samples: samples[0]["x"]}, "the collate function <lambda> raised KeyError: 'x'"),
        (RAGGED, {"collate_fn": lambda samples: means(samples[1:])}, r"input is float32\[7, 2\], and the PEF takes"),
        (RAGGED, {"collate_fn": 3}, "collate_fn is of type int"),
        (RAGGED, {"collate_fn": f"{__name__}:SIZE"}, "SIZE is of type int, which cannot be called"),
        (RAGGED, {"collate_fn": f"{__name__}:mean"}, "did you mean means?"),
        (RAGGED, {}, r"a sample has \(points, label, text\)"),
        ([{"input": POINTS[0].tolist(), "target": 0}] * 9, {}, r'dataset.with_format\("torch"\)'),
        ([{"input": POINTS[0], "target": 0}, {"input": POINTS[:3, 0], "target": 0}] * 9, {}, "gives float32"),
    ],
)
def test_what_makes_no_batch_is_refused(one: ss.Pef, data: object, how: dict[str, Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        trained(one, data, **how)


def test_columns_that_nobody_takes_may_be_anything(one: ss.Pef) -> None:
    samples = [
        {
            "idx": None,
            "text": "a" * index,
            "tokens": torch.zeros(index),
            "input": POINTS[index],
            "target": LABELS[index],
        }
        for index in range(40)
    ]
    plain = [{name: of[name] for name in ("target", "input")} for of in samples]
    assert trained(one, samples, **ORDERED).losses == trained(one, plain, **ORDERED).losses


class Balanced:
    """A sampler without a length, with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def __iter__(self) -> Iterator[int]:
        for _ in range(17):
            for label in (0, 1):
                of_label = (LABELS[:40] == label).nonzero().flatten()
                yield int(of_label[torch.randint(len(of_label), (1,), generator=self.generator)])


class Buckets(list[list[int]]):
    """A batch sampler, whose order depends on the epoch."""

    def __init__(self) -> None:
        super().__init__([[*range(start, start + SIZE)] for start in range(0, 40, SIZE)])
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        return iter([self[(index + 2 * self.epoch) % len(self)] for index in range(len(self))])


class Epochs:
    """A data set that knows its epoch."""

    def __init__(self, size: int = 40) -> None:
        self.epoch, self.size = 0, size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input": POINTS[index] + self.epoch, "target": LABELS[index]}


SAMPLES = [{"input": POINTS[index], "target": LABELS[index]} for index in range(40)]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "in order": lambda: DataLoader(cast("Any", SAMPLES), SIZE),
    "shuffled by its generator": lambda: DataLoader(cast("Any", SAMPLES), SIZE, shuffle=True, generator=generator()),
    "weighted": lambda: DataLoader(
        cast("Any", SAMPLES), SIZE, sampler=WeightedRandomSampler([1.0, 3.0] * 20, 34, generator=generator())
    ),
    "own, collated": lambda: DataLoader(cast("Any", RAGGED), SIZE, sampler=Balanced(), collate_fn=means),
    "batches": lambda: DataLoader(cast("Any", SAMPLES), batch_sampler=Buckets()),
    "batches of torch": lambda: DataLoader(
        cast("Any", SAMPLES), batch_sampler=BatchSampler(RandomSampler(SAMPLES, generator=generator()), SIZE, False)
    ),
    "epochs": lambda: DataLoader(cast("Any", Epochs()), SIZE, drop_last=True),
    "workers": lambda: DataLoader(cast("Any", Epochs()), SIZE, num_workers=1, prefetch_factor=3),
    "a part of the data": lambda: DataLoader(cast("Any", SAMPLES), SIZE, sampler=SequentialSampler(range(20))),
}


def loop(loader: DataLoader[Any], epochs: int) -> list[Any]:
    """The whole batches of epochs, as a script has them."""
    found = []
    for epoch in range(epochs):
        for one in cast("Any", (loader.dataset, loader.sampler, loader.batch_sampler)):
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)
        found += [batch for batch in loader if len(batch["target"]) == SIZE]
    return found


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_gives_the_batches_of_a_loop_over_it(name: str, one: ss.Pef, tmp_path: Path) -> None:
    wanted = in_pytorch(loop(LOADERS[name](), 3), lambda batch: cast("dict[str, Tensor]", batch))
    saves: dict[str, Any]
    loader, saves = LOADERS[name](), {"checkpoint_dir": tmp_path / "ck", "quiet": True, "threads": 1}
    begun = ss.run(one, loader, steps=6, **saves)
    rest = ss.run(one, loader, epochs=3, resume="auto", **saves)  # plays the earlier epochs: the loader is as it was
    assert begun.losses + rest.losses == wanted


def test_a_loader_is_dealt_to_replicas_and_says_what_it_cannot_keep(
    pef: ss.Pef, capfd: pytest.CaptureFixture[str]
) -> None:
    batches = [[*range(start, start + 32)] for start in range(0, 320, 32)]
    of_batches: Any = DataLoader(TensorDataset(*TRAIN), batch_sampler=[one[::2] for one in batches] + batches)
    # the batches of a step hold the samples that a DistributedSampler gives the replicas
    pairs = [[*range(start + at, start + 64, 2)] for start in range(0, 320, 64) for at in (0, 1)]
    of_pairs: Any = DataLoader(TensorDataset(*TRAIN), batch_sampler=pairs)
    assert trained(pef, of_pairs, threads=1).losses == trained(pef, TRAIN, **ORDERED).losses
    with pytest.raises(DataError, match="gives batches of other sizes, and the PEF takes 32 of a replica"):
        trained(pef, of_batches)
    some = SubsetRandomSampler(range(320, 400))
    loaders = DataLoader(TensorDataset(*TRAIN), 7, timeout=3, num_workers=1), DataLoader(WHOLE, 10, sampler=some)
    run = ss.run(pef, loaders, epochs=1)
    told = capfd.readouterr().out
    assert "batch_size=7 of the DataLoader is not used: the PEF takes 32 of a replica" in told
    assert "timeout of the DataLoader is not used" in told
    assert "drop_last" not in told
    loaders = DataLoader(TensorDataset(*TRAIN), 32, drop_last=True), DataLoader(WHOLE, 33, drop_last=True)
    assert (
        "drop_last=True of the DataLoader to evaluate is not used" in ss.run(pef, loaders, steps=1).summary.notices[-1]
    )
    other = trained(pef, (TRAIN, HELD_OUT), **ORDERED)
    assert run.losses == trained(pef, (TRAIN, HELD_OUT), steps=5, **ORDERED).losses
    assert (run.evaluations[0].samples, other.evaluations[0].samples) == (80, 80)
    assert ss.predict(pef, DataLoader(WHOLE, sampler=some)).record.samples == 80
    tail = DataLoader(WHOLE, batch_sampler=BatchSampler(range(50), 32, drop_last=False))
    assert ss.predict(pef, tail).record.samples == 50


class Noisy(TensorDataset):
    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x, y = (tensor[index] for tensor in self.tensors)
        return x + torch.randn_like(x), y


class NoisyStream(IterableDataset[tuple[Tensor, ...]]):
    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        yield from (Noisy(*HELD_OUT)[index] for index in range(len(HELD_OUT[0])))


def _no_file(number: int) -> None:
    raise OSError(f"worker {number} has no file")


@pytest.mark.parametrize("data", [WHOLE, NoisyStream()])
def test_a_worker_init_fn_that_fails_is_reported_with_its_line(pef: ss.Pef, data: Any) -> None:
    with pytest.raises(DataError, match=r"^worker_init_fn of the DataLoader raised OSError: worker 0 has no") as caught:
        trained(pef, DataLoader(data, 32, num_workers=1, worker_init_fn=_no_file))
    assert 'raise OSError(f"worker {number} has no file")' in str(caught.value.where)


@pytest.mark.parametrize("held_out", [Noisy(*HELD_OUT), NoisyStream()])
def test_what_an_evaluation_draws_depends_on_no_number_of_replicas(pef: ss.Pef, held_out: Any) -> None:
    how: dict[str, Any] = {"steps": 1, "lr": 0.0, "evaluate_every": 1}
    layouts = ((HELD_OUT, 2), (held_out, 2), (held_out, 3), (held_out, 4))
    found = [trained(pef, (TRAIN, data), replicas=count, **how).evaluations[-1].loss for data, count in layouts]
    assert found[0] != found[1] == found[2] == found[3]


def test_a_collate_function_keeps_all_samples_of_an_evaluation(pef: ss.Pef) -> None:
    fewer = DataLoader(WHOLE, collate_fn=lambda samples: default_collate(samples[:-1] or samples))
    with pytest.raises(DataError, match=r"a batch of 32 samples has \w+ of shape \[31, 2\]"):
        ss.predict(pef, fewer)


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (lambda: Own(WHOLE), "Own of the given data has an __iter__ of its own"),
        (lambda: DataLoader(WHOLE, batch_size=None), "has batch_size=None: its data set gives whole batches"),
        (
            lambda: DataLoader(WHOLE, sampler=iter(range(64))),
            "the range_iterator of the given data gives 0 in epoch 2, and 64",
        ),
        (
            lambda: DataLoader(WHOLE, sampler=(index for index in range(64))),
            "a copy of the generator of the given data raised",
        ),
        (lambda: DataLoader(WHOLE, sampler=[]), "the list of the given data gives no samples"),
        (
            lambda: DataLoader(WHOLE, sampler=[500] * 64),
            "the list of the given data gives the index 500, and there are 400",
        ),
        (
            lambda: DataLoader(cast("Any", Epochs(80)), num_workers=1, persistent_workers=True),
            "which workers that are kept would not see",
        ),
    ],
)
def test_loaders_that_cannot_be_kept_are_refused(pef: ss.Pef, loader: Callable[[], Any], text: str) -> None:
    with pytest.raises(DataError, match=text):
        trained(pef, loader(), steps=2)
    with pytest.raises(DataError, match=r"a DataLoader with a sampler, which is of all samples"):
        trained(pef, DataLoader(WHOLE, sampler=[1] * 90), set={"data.evaluation_fraction": 0.5})
