"""What does not depend on the number of replicas, or does in a known way: norms, shards, random numbers, threads."""

import random
from contextlib import closing
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset

from sambasim.data.buckets import Shapes
from sambasim.data.datasets import WatchedDataset
from sambasim.ir.program import Member, ParameterGroup
from sambasim.ir.types import ALIGNMENT_ELEMENTS, NORM_BLOCK_ELEMENTS, Slice, align, cut_at
from sambasim.options.grammar import parse_input
from sambasim.options.training import DataOptions, TrainingOptions
from sambasim.runtime.machine import process
from sambasim.runtime.machine.communicator import single_rank
from sambasim.runtime.machine.process import Stream, derive, seed_everything
from sambasim.runtime.run.plan import plan
from sambasim.runtime.run.replica import Shard
from sambasim.runtime.values.mean import parts_of, square_sums, total_norm


@settings(max_examples=25)
@given(
    world_size=st.integers(1, 7),
    sizes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 999)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_a_norm_has_the_same_bits_at_any_world_size(world_size: int, sizes: list[tuple[int, int]], seed: int) -> None:
    members, start, block = [], 0, 0
    for number, (blocks, rest) in enumerate(sizes):
        members.append(Member(f"p{number}", f"g{number}", start, blocks * NORM_BLOCK_ELEMENTS + rest, block))
        start, block = align(start + members[-1].numel, ALIGNMENT_ELEMENTS), block + members[-1].blocks
    group = ParameterGroup("group_0", "float32", start, tuple(members), 0, {})
    gradient = torch.zeros(start)
    for member in members:
        values = torch.randn(member.numel, generator=torch.Generator().manual_seed(seed))
        gradient[member.start : member.start + member.numel] = values

    def sums(owned: Slice) -> list[float]:
        return square_sums(parts_of(group, gradient, owned), block)()

    (slices,) = cut_at([(group.block_starts, start)], world_size)
    assert [slices[0][0], slices[-1][1]] == [0, start]
    norm = total_norm(map(sum, zip(*map(sums, slices), strict=True)))
    assert norm == total_norm(sums((0, start)))
    assert norm == pytest.approx(float(gradient.double().norm()), rel=1e-12)


class Numbered(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is `(i, what this replica draws for it)`."""

    def __len__(self) -> int:
        return 53

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = float(torch.rand(())) + float(np.random.rand()) + random.random()
        return torch.tensor(index), torch.tensor(drawn)


def _shard(rank: int, world_size: int, batch_size: int = 4, workers: int = 0, accumulation: int = 1) -> Shard:
    return Shard(
        WatchedDataset(Numbered(), "numbers"),
        rank=rank,
        world_size=world_size,
        batch_size=batch_size,
        accumulation_steps=accumulation,
        options=DataOptions(source="synthetic", workers=workers),
        shapes=Shapes([[parse_input("number", "int64[]"), parse_input("drawn", "float32[]")]], {}),
        seed=3,
    )


def _dealt(
    world_size: int, steps: int, epoch: int, used: int = 0, batch_size: int = 4, accumulation: int = 1
) -> list[int]:
    """The samples that all replicas take in so many steps."""
    seen: list[int] = []
    for rank in range(world_size):
        shard = _shard(rank, world_size, batch_size, accumulation=accumulation)
        shard.begin_epoch(epoch, 0, used)
        for _ in range(steps * accumulation):
            seen += shard.next_batch()["number"].tolist()
    return seen


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_shards_are_disjoint_and_the_plan_counts_what_they_leave_out(world_size: int, accumulation: int) -> None:
    training = TrainingOptions(batch_size=4, accumulation_steps=accumulation)
    planned = plan(len(Numbered()), world_size, training)
    epochs = [_dealt(world_size, planned.steps_per_epoch, epoch, accumulation=accumulation) for epoch in range(2)]
    for seen in epochs:
        assert len(seen) == len(set(seen)) == len(Numbered()) - planned.left_out
    assert planned.left_out < 4 * accumulation * world_size
    assert epochs[0] != epochs[1], "each epoch deals anew"


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.integers(0, 3))
def test_a_run_that_goes_on_with_other_replicas_deals_out_the_rest_of_the_epoch(
    before: int, after: int, batch_size: int, accumulation: int, epoch: int, steps: int
) -> None:
    """Every sample once, but for those that make no whole step in the end."""
    dealt = partial(_dealt, epoch=epoch, batch_size=batch_size, accumulation=accumulation)
    planned = plan(len(Numbered()), before, TrainingOptions(batch_size=batch_size, accumulation_steps=accumulation))
    steps = min(steps, planned.steps_per_epoch)
    here = planned.position(steps, 0).used
    first = dealt(before, steps)
    assert len(first) == here
    left = (len(Numbered()) - here) // after // batch_size // accumulation
    second = dealt(after, left, used=here)
    assert len({*first, *second}) == len(first) + len(second)
    assert len(Numbered()) - len(first) - len(second) < after * batch_size * accumulation
    if before == after:
        assert sorted(first + second) == sorted(dealt(before, planned.steps_per_epoch))


def test_what_a_dataset_draws_does_not_depend_on_its_workers() -> None:
    def drawn(workers: int, used: int) -> list[float]:
        with closing(_shard(1, 2, workers=workers, accumulation=2)) as shard:
            shard.begin_epoch(3, used // 16, used)
            return [number for _ in range(6 - used // 8) for number in shard.next_batch()["drawn"].tolist()]

    alone = drawn(0, 0)
    assert drawn(1, 0) == alone
    assert drawn(2, 16) == alone[8:], "a run that goes on draws what it would have drawn"


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_dataset_draws_depends_on_the_replica_and_the_step_alone(workers: int) -> None:
    """Not on what was drawn before, nor on the process: replica 1 of 2 draws the same when it is played beside 0."""

    def drawn(rank: int, *, after: int) -> list[float]:
        seed_everything(after)
        with closing(_shard(rank, 2, workers=workers)) as shard:
            shard.begin_epoch(0, 0)
            first = shard.next_batch()["drawn"].tolist()
            torch.rand(after)
            return [*first, *shard.next_batch()["drawn"].tolist()]

    assert drawn(1, after=1) == drawn(1, after=9)
    assert set(drawn(0, after=1)).isdisjoint(drawn(1, after=1))


@given(st.lists(st.tuples(*[st.integers(0, 2**40)] * 4, st.sampled_from(Stream)), min_size=2, max_size=2, unique=True))
def test_every_argument_of_a_seed_matters(keys: list[tuple[int, int, int, int, Stream]]) -> None:
    first, second = (derive(*key) for key in keys)
    assert first != second
    assert derive(*keys[0]) == first
    assert 0 <= first < 2**63


def test_an_emulation_takes_the_threads_that_as_many_ranks_would_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "cores_of_this_process", lambda: frozenset(range(8)))
    alone = single_rank("host", "no library")
    assert [process.default_threads(alone, replicas, {}) for replicas in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    assert process.default_threads(alone, 2, {"OMP_NUM_THREADS": "3"}) == 3
