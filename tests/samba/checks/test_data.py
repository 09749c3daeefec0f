"""What replicas are fed: samplers, batches, and values that an RDU would convert."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from sambasim.data.identity import identity_of
from sambasim.ir.graph import SectionKind
from sambasim.pef import read
from sambasim.samba.checks import data
from sambasim.samba.checks.data import Division, Samplers
from sambasim.samba.process import Reporter
from tests.samba.harness import compiled, with_sgd

LENGTH = 8
DATA = cast("Dataset[int]", range(LENGTH))  # it has all that a data set needs
FORWARD, STEP = (SectionKind.FWD,), tuple(SectionKind)
RIGHT = [Division(2, rank, LENGTH, (0, 3), False, "a") for rank in range(2)]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Samplers:
    for name in ("__iter__", "__init__"):
        monkeypatch.setattr(DistributedSampler, name, getattr(DistributedSampler, name))  # put back after the test
    samplers = Samplers()
    samplers.start()
    return samplers


def _sampler(rank: int = 0, **others: bool) -> "DistributedSampler[int]":
    return DistributedSampler(DATA, 2, rank, **others)


def _train(watched: Samplers, sampler: "DistributedSampler[int]", workers: int = 0) -> list[int]:
    loader: DataLoader[int] = DataLoader(DATA, sampler=sampler, num_workers=workers)
    drawn = []
    for batch in loader:
        watched.note_step()
        drawn.append(int(batch))
    return drawn


def test_the_data_of_a_sampler_has_an_identity(watched: Samplers) -> None:
    for number in range(2):
        list(DistributedSampler(TensorDataset(torch.full((4,), number)), 2, 0))
        watched.note_step()
        division, *_ = watched.feeding()
        assert division is not None
        assert division.data == identity_of(TensorDataset(torch.full((4,), number)))


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": 0}, "DP04: replicas 0 and 1 get the same samples: both samplers have rank 0"),
        ({"num_replicas": 4}, "DP05: the sampler of replica 1 divides the data among 4 replicas, and there are 2"),
        ({"order": (1, 3)}, "DP05: the samplers of replicas 0 and 1 differ in their seed, 0 and 1: samples are"),
        ({"order": (0, 4)}, "DP05: the samplers of replicas 0 and 1 differ in their epoch, 3 and 4: samples are"),
        ({"order": None}, "DP05: the samplers of replicas 0 and 1 differ in shuffle=: samples are"),
        ({"drop_last": True}, "DP05: the samplers of replicas 0 and 1 differ in drop_last=: samples are"),
        ({"data": "b"}, "DP05: the samplers of replicas 0 and 1 differ in their data, a and b: samples"),
        ({"length": 9}, "DP05: the samplers of replicas 0 and 1 differ in the length of their data, 8 and 9: samples"),
    ],
)
def test_samplers_that_divide_the_data_wrongly_are_found(change: dict[str, object], words: str) -> None:
    finding = data.wrong_division([RIGHT[0], replace(RIGHT[1], where="app.py:1: DistributedSampler(…)", **change)])  # type: ignore[arg-type]  # some of its fields
    assert finding is not None
    assert finding.words.startswith(words)
    assert finding.where == "app.py:1: DistributedSampler(…)"


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_in_an_epoch_is_no_finding(watched: Samplers, reporter: Reporter, workers: int, first: bool) -> None:
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
            division, _, _ = watched.feeding()
            assert division is not None
            assert (division.rank, division.order) == (1, (0, epoch))
    assert not reporter.findings


def _in_batches(samples: list[int], batch_size: int = 4) -> list[tuple[str, ...]]:
    return [tuple(map(str, samples[start : start + batch_size])) for start in range(0, len(samples), batch_size)]


def test_two_equal_batches_of_two_replicas_are_found() -> None:
    times = Counter[tuple[int, int]]()
    a, b, c = (("a",), ("b",), ("c",))
    assert data.equal_batches([a, a, b], times, 1, None) is None
    assert data.equal_batches([a, b, b], times, 2, None) is None, "other replicas: it may be chance"
    finding = data.equal_batches([c, a, a], times, 8, "app.py:1: run()")
    assert finding is not None
    assert finding.words == "DP04: replicas 1 and 2 get the same samples, again in step 8"
    assert finding.where == "app.py:1: run()"


def test_replicas_that_share_samples_are_found() -> None:
    samples = list(range(64))
    assert data.shared_samples([_in_batches(samples[rank::2]) for rank in range(2)], None) is None
    finding = data.shared_samples([_in_batches(samples), _in_batches(samples[::-1])], "app.py:1: run()")
    assert finding is not None
    assert finding.words == "DP05: 64 of the 64 samples of the first 16 steps go to several replicas"


def test_shuffled_epochs_draws_with_replacement_and_padding_are_no_finding() -> None:
    generator = torch.Generator().manual_seed(0)
    epochs = [torch.randperm(48, generator=generator).tolist() for _ in range(3)]
    fed = [_in_batches([sample for epoch in epochs for sample in epoch[rank::2]]) for rank in range(2)]
    assert data.shared_samples(fed, None) is None
    for _ in range(20):
        draws = [torch.randint(500, (400,), generator=generator).tolist() for _ in range(3)]
        assert data.shared_samples([_in_batches(drawn) for drawn in draws], None) is None
    assert data.shared_samples([_in_batches([*range(rank, 13, 4), 0]) for rank in range(4)], None) is None


class Picker(nn.Module):
    """Row numbers `[batch]`, each of which selects rows in another way, to the loss of each row against its label."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.embedding = nn.Parameter(torch.randn(50, 4)), nn.Embedding(50, 4)

    def forward(
        self,
        token: Tensor,
        index: Tensor,
        select: Tensor,
        gather: Tensor,
        one_hot: Tensor,
        scale: Tensor,
        label: Tensor,
    ) -> Tensor:
        first = self.embedding(token) * scale + self.rows[index] + self.rows.index_select(0, select)
        second = self.rows.gather(0, gather.unsqueeze(1).expand(-1, 4)) + nn.functional.one_hot(one_hot, 4)
        return nn.functional.cross_entropy(first + second, label)


def test_lossy_values_are_found_and_row_numbers_are_not(tmp_path: Path) -> None:
    rows = ("token", "index", "select", "gather", "one_hot")
    batch = {name: torch.zeros(2, dtype=torch.int64) for name in rows}
    batch |= {"scale": torch.ones(2, 1), "label": torch.zeros(2, dtype=torch.int64)}
    program = read(Path(compiled(with_sgd(Picker), list(batch.values()), tmp_path))).program
    large = torch.tensor([0, 40_000])
    int16 = "an RDU stores labels as int16, up to 32767"
    float64 = "scale is float64: an RDU computes in bf16, and keeps 8 of its 53 bits"
    cases: list[tuple[dict[str, Tensor], list[str]]] = [
        (dict.fromkeys(rows, large), []),
        ({"label": torch.tensor([-100, 32_767])}, []),
        ({"label": large}, [f"label has 40000: {int16}"]),
        ({"label": -large}, [f"label has -40000: {int16}"]),
        ({"scale": torch.ones(2, 1, dtype=torch.float64)}, [float64]),
    ]
    for change, words in cases:
        findings = list(data.lossy(program, {**batch, **change}, "app.py:1: run()"))
        assert [finding.words for finding in findings] == [f"AP03: {what}" for what in words]
        assert all(finding.where == "app.py:1: run()" for finding in findings)
