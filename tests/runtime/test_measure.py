"""Measuring all-reduce paths: operands that expose wrong results, the order of turns, sizes, bandwidths."""

from collections import Counter
from itertools import chain, pairwise, permutations

import pytest
import torch

from sambasim.runtime.measure.collectives import order, sizes_between
from sambasim.runtime.measure.paths import PERIOD_ELEMENTS, Expected, draw, fill
from sambasim.units import KIB, MIB

NUMEL = 2 * PERIOD_ELEMENTS + 100


def operands_of_all(run: int, world_size: int) -> list[torch.Tensor]:
    flats = [torch.empty(NUMEL) for _ in range(world_size)]
    for rank, flat in enumerate(flats):
        fill(flat, draw(run, rank, world_size, NUMEL).own)
    return flats


def test_every_rank_and_every_run_has_data_of_its_own() -> None:
    blocks = [draw(run, rank, 3, NUMEL).own for run in range(3) for rank in range(3)]
    assert len({tuple(block[:8].tolist()) for block in blocks}) == 9


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_what_is_expected_is_what_the_operands_give(world_size: int) -> None:
    """And an order of additions other than the tree has other bits."""
    flats = operands_of_all(1, world_size)
    expected = draw(1, 0, world_size, NUMEL)
    in_turn, back = sum(flats[1:], flats[0]), sum(flats[-2::-1], flats[-1])
    for total in (in_turn, back):
        assert expected.near_sum.first_difference(total, 0) is None
        assert expected.near_mean.first_difference(total / world_size, 0) is None
    pairs = [left + right for left, right in zip(flats[::2], flats[1::2], strict=False)] + flats[len(flats) // 2 * 2 :]
    tree = sum(pairs[1:], pairs[0])
    assert expected.mean.first_difference(tree / world_size, 0) is None
    if world_size > 3:
        assert expected.mean.first_difference(in_turn / world_size, 0) is not None


@pytest.mark.parametrize("name", ["mean", "near_mean", "near_sum"])
@pytest.mark.parametrize("element", [0, PERIOD_ELEMENTS, NUMEL - 1])
@pytest.mark.parametrize("change", [1e-3, float("nan")])
def test_one_wrong_element_is_found_wherever_it_is(name: str, element: int, change: float) -> None:
    expected: Expected = getattr(draw(0, 0, 2, NUMEL), name)
    result, start = torch.empty(NUMEL), 64
    fill(result, expected.block)
    assert expected.first_difference(result[start:], start) is None
    result[element] += change
    assert expected.first_difference(result, 0) == element
    assert expected.first_difference(result[start:], start) == (element if element >= start else None)


def test_sizes_grow_by_four_in_whole_cuts() -> None:
    assert list(sizes_between(1, 2000)) == [256, 1024, 2048]
    expected = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
    assert list(sizes_between(4 * KIB, 256 * MIB)) == expected


@pytest.mark.parametrize("count", range(3, 10))
def test_everybody_follows_every_other_one_equally_often(count: int) -> None:
    turns = [order(count, turn) for turn in range(2 * count)]
    assert all(sorted(turn) == list(range(count)) for turn in turns)
    behind = Counter(chain.from_iterable(pairwise(turn) for turn in turns))
    assert behind == dict.fromkeys(permutations(range(count), 2), 2)
    assert all(before[-1] != after[0] for before, after in pairwise(turns))
