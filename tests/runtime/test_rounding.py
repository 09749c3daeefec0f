"""Stochastic rounding: without error in the mean, and a function of seed, step and place."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sambasim.runtime.wide_update import Draws, round_stochastically

NUMEL = 64 * 1024


def _rounded(values: Tensor, seed: int = 0, step: int = 1) -> Tensor:
    out = torch.empty(values.numel(), dtype=torch.bfloat16)
    round_stochastically(values.clone(), Draws(seed, 0, 0).of(step, 0, values.numel()), out)
    return out


@pytest.mark.parametrize("exact", [1 + 0.1 / 128, -(1 + 0.7 / 128), 3e-39, 1e30])
def test_the_mean_of_many_roundings_is_the_number(exact: float) -> None:
    values = torch.full((NUMEL,), exact)
    number = values[0].double()
    rounded = _rounded(values).double()
    below, above = sorted(set(rounded.tolist()))
    assert below < number < above
    step = above - below
    # Of a draw with the probability p the standard deviation is at most a half, and of the mean of n less by √n.
    assert abs(rounded.mean() - number) < 5 * 0.5 * step / NUMEL**0.5


def test_each_number_becomes_one_of_its_neighbours_whatever_it_is() -> None:
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)) * torch.logspace(-20, 20, NUMEL)
    rounded = _rounded(values).float()
    nearest = values.bfloat16().float()
    step = torch.maximum(nearest.abs(), values.abs()) * 2.0**-7
    assert bool(((rounded - values).abs() < step).all())
    assert not torch.equal(rounded, nearest)


def test_what_bfloat16_holds_stays() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rounded = _rounded(every.float())
    numbers = ~every.isnan()
    assert torch.equal(rounded[numbers].view(torch.int16), every[numbers].view(torch.int16))
    assert bool(rounded[~numbers].isnan().all())


def test_what_is_not_a_number_stays_so_whatever_its_bits() -> None:
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32).repeat(16)
    assert bool(_rounded(bits.view(torch.float32)).isnan().all())


def test_one_seed_gives_the_same_bits_and_other_seeds_and_steps_give_others() -> None:
    values = torch.randn(NUMEL, generator=torch.Generator().manual_seed(2))
    assert torch.equal(_rounded(values), _rounded(values))
    assert not torch.equal(_rounded(values), _rounded(values, seed=1))
    assert not torch.equal(_rounded(values), _rounded(values, step=2))


@given(cuts=st.lists(st.integers(0, NUMEL // 64), max_size=5), seed=st.integers(0, 2**64 - 1))
def test_pieces_draw_what_the_whole_does(cuts: list[int], seed: int) -> None:
    draws = Draws(seed, 3, 1)
    ends = [0, *sorted(64 * cut for cut in cuts), NUMEL]
    pieces = [draws.of(7, start, stop) for start, stop in pairwise(ends)]
    assert torch.equal(torch.cat(pieces), draws.of(7, 0, NUMEL))


def test_groups_and_tensors_draw_by_themselves_and_evenly() -> None:
    drawn = [Draws(0, group, tensor).of(1, 0, NUMEL).double() for group in range(2) for tensor in range(2)]
    table = torch.stack(drawn)
    assert int(table.min()) >= 0
    assert int(table.max()) <= 65_535
    correlation = torch.corrcoef(table)
    assert float((correlation - torch.eye(4)).abs().max()) < 5 / NUMEL**0.5
    deviation = 65_536 / 12**0.5
    assert float((table.mean(1) - 32_767.5).abs().max()) < 5 * deviation / NUMEL**0.5
