"""DistributedSamplers, watched: in which order they shuffle, and how they divide the data among replicas."""

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.data.distributed import DistributedSampler

from sambasim.ir.graph import SectionKind
from sambasim.samba.checks import samplers as module
from sambasim.samba.checks.samplers import Division, Place, Samplers, different_epochs, wrong_division
from sambasim.samba.checks.telling import Telling

LENGTH = 8
DATA = cast("Dataset[int]", range(LENGTH))  # it has all that a data set needs
FORWARD, BACKWARD, STEP = (SectionKind.FWD,), (SectionKind.BCKWD,), tuple(SectionKind)
RIGHT = [Division(2, rank, LENGTH, (0, 3), False) for rank in range(2)]


@pytest.fixture
def telling(monkeypatch: pytest.MonkeyPatch) -> Telling:
    """What is told, in place of this process's own."""
    own = Telling(on_demand=True)
    monkeypatch.setattr(module, "telling", own)
    return own


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
def test_an_epoch_that_is_never_set_is_found(watched: Samplers, telling: Telling, workers: int) -> None:
    sampler = _sampler()
    first = _train(watched, sampler, workers)
    assert not telling.findings
    assert _train(watched, sampler, workers) == first, "so it is a mistake"
    (finding,) = telling.findings
    assert finding.words == "DP06: the sampler shuffles again as before, for its epoch is still 0"
    assert finding.where is not None
    assert finding.where.endswith("for batch in loader:")


def test_an_epoch_that_is_set_is_not(watched: Samplers, telling: Telling) -> None:
    sampler = _sampler()
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.append(tuple(_train(watched, sampler)))
    assert len(set(orders)) == 3
    assert not telling.findings


def test_a_batch_to_warm_up_with_is_not(watched: Samplers, telling: Telling) -> None:
    sampler = _sampler()
    next(iter(DataLoader(DATA, sampler=sampler)))
    watched.note_step()
    _train(watched, sampler)
    assert not telling.findings
    _train(watched, sampler)
    assert [finding.code for finding in telling.findings] == ["DP06"]


def test_the_order_of_the_data_and_evaluation_are_not(watched: Samplers, telling: Telling) -> None:
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
    assert not telling.findings


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
        ({"rank": 0}, "DP04: replicas 0 and 1 are fed the same samples: both samplers have rank 0"),
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


def test_a_rank_that_has_a_part_of_the_data_alone_is_told_to_take_the_whole() -> None:
    finding = wrong_division([RIGHT[0], replace(RIGHT[1], length=9)])
    assert finding is not None
    assert finding.remedy == (
        "give the sampler of every rank the whole data set, and no part of it: the sampler divides it"
    )


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_in_the_midst_of_an_epoch_is_not(
    watched: Samplers, telling: Telling, workers: int, first: bool
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
    assert not telling.findings


@pytest.mark.parametrize(
    "before", [(FORWARD, STEP), (FORWARD, BACKWARD, (SectionKind.OPT,))], ids=["the-same-batch", "sections-apart"]
)
def test_a_forward_alone_of_what_trains_hides_nothing(
    watched: Samplers, telling: Telling, before: tuple[tuple[SectionKind, ...], ...]
) -> None:
    sampler = _sampler()
    for _ in range(2):
        for x in DataLoader(DATA, sampler=sampler):
            for kinds in before:
                watched.note_run(kinds, {"x": x})
            watched.note_step()
    assert [finding.code for finding in telling.findings] == ["DP06"]


def test_a_batch_of_its_own_to_evaluate_hides_one_step_at_most(watched: Samplers, telling: Telling) -> None:
    sampler, fixed = _sampler(), torch.ones(1)
    for _ in range(2):
        for number, x in enumerate(DataLoader(DATA, sampler=sampler)):
            if number == 0:
                watched.note_run(FORWARD, {"x": fixed})
            watched.note_run(STEP, {"x": x})
            watched.note_step()
        assert watched.division() == Division(2, 0, LENGTH, (0, 0), False)
    assert [finding.code for finding in telling.findings] == ["DP06"]


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


def test_no_sampler_waits_while_a_loader_feeds_the_steps(watched: Samplers) -> None:
    sampler, forgetful = _sampler(), DataLoader(DATA)
    watched.note_run(STEP, {})
    assert watched.is_waiting(), sampler
    for _ in forgetful:
        watched.note_run(STEP, {})
        watched.note_step()
        assert not watched.is_waiting()
    watched.note_run(STEP, {})
    assert watched.is_waiting()
    assert not watched.has_fed


def test_a_sampler_that_evaluates_does_not_wait(watched: Samplers) -> None:
    evaluation = _sampler()
    for x in DataLoader(DATA, sampler=evaluation):
        watched.note_run(FORWARD, {"x": x})
    watched.note_run(STEP, {})
    watched.note_step()
    assert not watched.is_waiting()
    assert watched.division() is None


def test_a_sampler_that_was_made_before_has_the_line_that_goes_over_it() -> None:
    sampler, samplers = _sampler(), Samplers()
    samplers.start()
    _train(samplers, sampler)
    samplers.stop()
    assert str(samplers.line()).endswith("for batch in loader:")


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


def test_samplers_that_divide_the_data_are_not() -> None:
    assert wrong_division(RIGHT) is None
    assert wrong_division([None, RIGHT[1]]) is None
