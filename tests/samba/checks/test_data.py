"""What replicas are fed: samplers, batches, and values that an RDU would convert."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from sambasim import samba
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.pef import read
from sambasim.samba.checks.data import (
    Division,
    EqualBatches,
    Place,
    Samplers,
    different_epochs,
    digests,
    lossy,
    sample_digests,
    shared_samples,
    wrong_division,
)
from sambasim.samba.checks.findings import Reporter

LENGTH = 8


DATA = cast("Dataset[int]", range(LENGTH))  # it has all that a data set needs


FORWARD, BACKWARD, STEP = (SectionKind.FWD,), (SectionKind.BCKWD,), tuple(SectionKind)


RIGHT = [Division(2, rank, LENGTH, (0, 3), False) for rank in range(2)]


@pytest.fixture
def watched() -> Iterator[Samplers]:
    samplers = Samplers()
    original = DistributedSampler.__iter__, DistributedSampler.__init__, _BaseDataLoaderIter.__next__
    samplers.start()
    yield samplers
    samplers.stop()
    left = DistributedSampler.__iter__, DistributedSampler.__init__, _BaseDataLoaderIter.__next__
    assert left == original, "torch is as it was"


def _sampler(rank: int = 0, **others: bool) -> "DistributedSampler[int]":
    return DistributedSampler(DATA, 2, rank, **others)


def _train(watched: Samplers, sampler: "DistributedSampler[int]", workers: int = 0) -> list[int]:
    loader: DataLoader[int] = DataLoader(DATA, sampler=sampler, num_workers=workers)
    drawn = []
    for batch in loader:
        watched.note_step()
        drawn.append(int(batch))
    return drawn


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_that_is_never_set_is_found(watched: Samplers, reporter: Reporter, workers: int) -> None:
    sampler = _sampler()
    first = _train(watched, sampler, workers)
    assert not reporter.findings
    assert _train(watched, sampler, workers) == first, "so it is a mistake"
    (finding,) = reporter.findings
    assert finding.words == "DP06: the sampler shuffles in the same order again, because its epoch is still 0"
    assert finding.where is not None
    assert finding.where.endswith("for batch in loader:")


def test_an_epoch_that_is_set_is_not(watched: Samplers, reporter: Reporter) -> None:
    sampler = _sampler()
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.append(tuple(_train(watched, sampler)))
    assert len(set(orders)) == 3
    assert not reporter.findings


def test_a_batch_to_warm_up_with_is_not(watched: Samplers, reporter: Reporter) -> None:
    sampler = _sampler()
    next(iter(DataLoader(DATA, sampler=sampler)))
    watched.note_step()
    _train(watched, sampler)
    assert not reporter.findings
    _train(watched, sampler)
    assert [finding.code for finding in reporter.findings] == ["DP06"]


def test_the_order_of_the_data_and_evaluation_are_not(watched: Samplers, reporter: Reporter) -> None:
    in_order, evaluation, training = _sampler(shuffle=False), _sampler(), _sampler(1)
    for epoch in range(2):
        _train(watched, in_order)
        assert list(evaluation) == list(evaluation), "no optimizer step uses them"
        training.set_epoch(epoch)
        for number, _ in enumerate(training):
            if number == 2:
                assert len(list(evaluation)) == 4, "in the midst of an epoch"
            else:
                watched.note_step()
    assert not reporter.findings


def test_the_division_is_that_of_the_sampler_that_feeds_optimizer_steps(watched: Samplers) -> None:
    assert watched.division() is None
    list(_sampler(1))
    assert watched.division() is None
    _train(watched, _sampler(1))
    assert watched.division() == Division(2, 1, LENGTH, (0, 0), False)
    _train(watched, DistributedSampler(DATA, 1, 0))
    assert watched.division() is None, "the app divides the data itself"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 0}, "DP04: replicas 0 and 1 get the same samples: both samplers have rank 0"),
        ({"num_replicas": 4}, "DP05: the sampler of replica 1 divides the data among 4 replicas, and there are 2"),
        (
            {"order": (1, 3)},
            "DP05: the samplers of replicas 0 and 1 differ in their seed, 0 and 1: samples are",
        ),
        ({"order": (0, 4)}, "DP05: the samplers of replicas 0 and 1 differ in their epoch, 3 and 4: samples are"),
        ({"order": None}, "DP05: the samplers of replicas 0 and 1 differ in shuffle=: samples are skipped"),
        ({"length": 9}, "DP05: the samplers of replicas 0 and 1 differ in the length of their data, 8 and 9: samples"),
        ({"drop_last": True}, "DP05: the samplers of replicas 0 and 1 differ in drop_last=: samples are skipped"),
    ],
)
def test_samplers_that_do_not_divide_the_data_are_found(change: dict[str, object], words: str) -> None:
    finding = wrong_division([RIGHT[0], replace(RIGHT[1], where="app.py:1: DistributedSampler(…)", **change)])  # type: ignore[arg-type]  # some of its fields
    assert finding is not None
    assert finding.words.startswith(words)
    assert finding.where == "app.py:1: DistributedSampler(…)"


def test_what_to_do_is_told_with_what_the_app_has() -> None:
    own = "DistributedSampler(dataset, num_replicas=dist.get_world_size(), rank=dist.get_rank(), "
    for change, told in (
        ({"order": (7, 3)}, "seed=7), and set_epoch(epoch) with the same epoch on every rank"),
        ({"order": (7, 3), "drop_last": True}, "drop_last=True, seed=7), and set_epoch(epoch) with the same epoch"),
        ({"order": None}, "shuffle=False) on every rank"),
    ):
        first = replace(RIGHT[0], **change)
        finding = wrong_division([first, replace(first, num_replicas=4)])
        assert finding is not None
        assert str(finding.remedy).startswith(f"{own}{told}")


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_in_the_midst_of_an_epoch_is_not(
    watched: Samplers, reporter: Reporter, workers: int, first: bool
) -> None:
    """Before the step of a batch, or behind it. Workers have drawn the whole epoch by then."""
    training, evaluation = _sampler(1), _sampler()

    def evaluate() -> None:
        for x in DataLoader(DATA, 3, sampler=evaluation, drop_last=True):  # which draws a fourth behind the last batch
            watched.note_run(FORWARD, {"x": x})

    for epoch in range(3):
        training.set_epoch(epoch)
        for number, own in enumerate(DataLoader(DATA, sampler=training, num_workers=workers)):
            if number == 1 and first:
                evaluate()
            watched.note_run(STEP, {"x": own})
            watched.note_step()
            if number == 1 and not first:
                evaluate()
            division = watched.division()
            assert division is not None
            assert (division.rank, division.order) == (1, (0, epoch))
    assert not reporter.findings


def test_the_line_is_that_where_the_sampler_was_made(watched: Samplers) -> None:
    sampler = _sampler()
    assert watched.line() is None
    _train(watched, sampler)
    division = watched.division()
    assert division is not None
    assert division.where is not None
    assert division.where.endswith("return DistributedSampler(DATA, 2, rank, **others)")
    assert watched.line() == division.where
    _train(watched, DistributedSampler(DATA, 1, 0))
    assert watched.division() is None
    assert str(watched.line()).endswith("_train(watched, DistributedSampler(DATA, 1, 0))")


def test_a_sampler_waits_until_it_feeds_a_step(watched: Samplers) -> None:
    whole: DistributedSampler[int] = DistributedSampler(DATA, 1, 0)
    assert not watched.is_waiting(), f"{whole} divides nothing"
    sampler = _sampler()
    next(iter(sampler))
    assert watched.is_waiting()
    _train(watched, sampler)
    assert not watched.is_waiting()


def test_replicas_in_different_epochs_are_found() -> None:
    finding = different_epochs([Place(1, 3), Place(2, 1)], "app.py:1: run()")
    assert finding is not None
    assert finding.words == (
        "DP09: the epochs of replicas differ in length: replica 0 takes step 3 of epoch 1, and replica 1 step 1 of "
        "epoch 2"
    )
    assert finding.where == "app.py:1: run()"
    assert different_epochs([Place(2, 1), Place(2, 1)], None) is None
    assert different_epochs([Place(2, 1), None, Place(1, 3)], None) is None


def test_the_place_is_that_of_the_last_optimizer_step(watched: Samplers) -> None:
    sampler = _sampler(1)
    assert watched.place() is None
    _train(watched, sampler)
    first = watched.place()
    assert first is not None
    assert first.epoch == 1
    list(sampler)
    assert watched.place() is None, "of these samples no step was made yet"
    _train(watched, sampler)
    assert watched.place() == Place(2, first.step)


def _in_batches(samples: list[int], batch_size: int = 4) -> list[tuple[str, ...]]:
    return [tuple(map(str, samples[start : start + batch_size])) for start in range(0, len(samples), batch_size)]


def test_a_sample_has_one_digest_whatever_batch_it_is_in() -> None:
    x, label = torch.arange(12.0).view(4, 3), torch.tensor([1, 2, 1, 2])
    whole = sample_digests({"x": x, "label": label})
    assert len(set(whole)) == 4
    order = [2, 0]
    assert sample_digests({"x": x[order], "label": label[order]}) == (whole[2], whole[0])
    assert sample_digests({"x": x[order], "label": label[[1, 1]]}) != (whole[2], whole[0])


@pytest.mark.parametrize("look", [digests, sample_digests])
def test_a_batch_to_warm_up_with_is_not_looked_at(look: Callable[[dict[str, Tensor]], tuple[str, ...]]) -> None:
    for batch in (
        {"x": torch.zeros(4, 3), "label": torch.zeros(4, dtype=torch.long)},
        {"x": torch.ones(4, 3), "label": torch.full((4,), 2)},
        {"x": torch.zeros(1, 3), "label": torch.tensor([5])},
    ):
        assert look(batch) == ()
    for batch in (
        {"x": torch.arange(12.0).view(4, 3), "label": torch.zeros(4, dtype=torch.long)},
        {"x": torch.zeros(4, 3), "label": torch.tensor([0, 0, 0, 1])},
        {"x": torch.tensor([[0.5]]), "label": torch.tensor([1])},
    ):
        assert look(batch) != ()


def test_two_replicas_that_are_fed_alike_twice_are_found() -> None:
    noted = EqualBatches()
    a, b, c = (("a",), ("b",), ("c",))
    assert noted.note([a, a, b], 1, None) is None
    assert noted.note([a, b, b], 2, None) is None, "once these, once those: a chance"
    finding = noted.note([c, a, a], 8, "app.py:1: run()")
    assert finding is not None
    assert finding.words == "DP04: replicas 1 and 2 get the same samples, again in step 8"
    assert finding.where == "app.py:1: run()"


def test_replicas_that_share_samples_are_found() -> None:
    data = list(range(64))
    apart = [_in_batches(data[rank::2]) for rank in range(2)]
    assert shared_samples(apart, None) is None
    whole = [_in_batches(data), _in_batches(data[::-1])]
    finding = shared_samples(whole, "app.py:1: run()")
    assert finding is not None
    assert finding.words == "DP05: 64 of the 64 samples of the first 16 steps go to several replicas"


def test_a_second_epoch_in_another_order_is_no_finding() -> None:
    generator = torch.Generator().manual_seed(0)
    epochs = [torch.randperm(48, generator=generator).tolist() for _ in range(3)]
    fed = [_in_batches([sample for epoch in epochs for sample in epoch[rank::2]]) for rank in range(2)]
    assert shared_samples(fed, None) is None


def test_drawing_with_replacement_is_no_finding() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        draws = [torch.randint(500, (400,), generator=generator).tolist() for _ in range(3)]
        assert shared_samples([_in_batches(drawn) for drawn in draws], None) is None


def test_the_padding_of_a_sampler_is_no_finding() -> None:
    fed = [_in_batches([*range(rank, 13, 4), 0]) for rank in range(4)]
    assert shared_samples(fed, None) is None


class Tagger(nn.Module):
    """Tokens `[batch]` to the loss of each against its label."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 4)

    def forward(self, token: Tensor, scale: Tensor, label: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.embedding(token) * scale, label)


class Picker(nn.Module):
    """Row numbers `[batch]`, each picked with in another way, to the loss of each row against its label."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(50, 4))

    def forward(self, index: Tensor, select: Tensor, gather: Tensor, one_hot: Tensor, label: Tensor) -> Tensor:
        one = self.rows[index] + self.rows.index_select(0, select)
        other = self.rows.gather(0, gather.unsqueeze(1).expand(-1, 4)) + nn.functional.one_hot(one_hot, 4)
        return nn.functional.cross_entropy(one + other, label)


def _compiled(model: nn.Module, inputs: list[Tensor], folder: Path) -> Program:
    samba.from_torch_model_(model)
    optimizer = samba.optim.SGD(model.parameters(), lr=0.1)
    pef = samba.session.compile(model, inputs, optimizer, "net", config_dict={"output_folder": str(folder)})
    return read(Path(pef)).program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    inputs = [torch.zeros(2, dtype=torch.int64), torch.ones(2, 1), torch.zeros(2, dtype=torch.int64)]
    return _compiled(Tagger(), inputs, tmp_path_factory.mktemp("out"))


def test_row_numbers_are_no_labels_however_they_pick(tmp_path: Path) -> None:
    names = ["index", "select", "gather", "one_hot", "label"]
    program = _compiled(Picker(), [torch.zeros(2, dtype=torch.int64) for _ in names], tmp_path)
    batch = {name: torch.tensor([0, 40_000]) for name in names}
    assert [finding.what.split(":")[0] for finding in lossy(program, batch, None)] == ["label has 40000"]


def _batch(token: int = 1, scale: torch.dtype = torch.float32, label: int = 1) -> dict[str, Tensor]:
    return {
        "token": torch.tensor([0, token]),
        "scale": torch.ones(2, 1, dtype=scale),
        "label": torch.tensor([label, 0]),
    }


@pytest.mark.parametrize("batch", [_batch(), _batch(token=50_000), _batch(label=32_767), _batch(label=-100)])
def test_what_stays_as_it_is_is_no_finding(program: Program, batch: dict[str, Tensor]) -> None:
    assert list(lossy(program, batch, None)) == []


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (_batch(label=32_768), "AP03: label has 32768: an RDU stores labels as int16, up to 32767"),
        (_batch(label=-40_000), "AP03: label has -40000: an RDU stores labels as int16"),
        (_batch(scale=torch.float64), "AP03: scale is float64: an RDU computes in bf16"),
    ],
)
def test_what_does_not_is(program: Program, batch: dict[str, Tensor], words: str) -> None:
    (finding,) = lossy(program, batch, "app.py:1: run()")
    assert finding.words.startswith(words)
    assert finding.where == "app.py:1: run()"
