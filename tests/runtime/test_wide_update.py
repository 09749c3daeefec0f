"""Updates of 16-bit parameters: computed in float32, rounded to nearest or stochastically by a function of the seed."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sambasim.collectives.slices import cut
from sambasim.runtime.optimizers import Scalars, slice_update
from sambasim.runtime.wide_update import PIECE_ELEMENTS, Draws, WideUpdates, round_stochastically
from tests.runtime.test_optimizers import KINDS, SGD

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


TRAINED_NUMEL = 2 * PIECE_ELEMENTS + 64


class Trained:
    """Parameters and states that begin alike for equal `numel`, and what updates them."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.bfloat16, numel: int = TRAINED_NUMEL) -> None:
        hyperparameters, self.states = KINDS[kind]
        generator = torch.Generator().manual_seed(numel)
        self.parameter = torch.randn(numel, generator=generator).to(dtype)
        self.gradients = [torch.randn(numel, generator=generator).to(dtype) for _ in range(3)]
        self.state = {state: torch.zeros(numel, dtype=dtype) for state in self.states}
        self.scalars = Scalars(kind, hyperparameters)

    def train(self, seed: int | None, world_size: int = 1) -> Tensor:
        """Three steps, in as many slices as there are replicas; parameters and states after them."""
        updates, scalars = WideUpdates(seed), self.scalars
        slices = cut(self.parameter.numel(), world_size)
        by_slice = [
            updates.slice(
                0,
                start,
                self.parameter[start:stop],
                {name: state[start:stop] for name, state in self.state.items()},
                lambda: scalars.step,
                partial(slice_update, scalars=scalars),
            )
            for start, stop in slices
        ]
        for step, gradient in enumerate(self.gradients, start=1):
            scalars.begin(step, 1.0)
            for update, (start, stop) in zip(by_slice, slices, strict=True):
                update(gradient[start:stop])
        return torch.stack([self.parameter, *self.state.values()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_is_one_of_float32_rounded_once(kind: str, dtype: torch.dtype) -> None:
    trained, expected = Trained(kind, dtype), Trained(kind, dtype)
    for step, gradient in enumerate(expected.gradients, start=1):
        wide = expected.parameter.float()
        states = {name: state.float() for name, state in expected.state.items()}
        expected.scalars.begin(step, 1.0)
        slice_update(wide, states, expected.scalars)(gradient.float())
        expected.parameter.copy_(wide)
        for name, state in states.items():
            expected.state[name].copy_(state)
    assert torch.equal(trained.train(None), torch.stack([expected.parameter, *expected.state.values()]))


@pytest.mark.parametrize(("kind", "kernel"), [("adam", torch._fused_adam_), ("adamw", torch._fused_adamw_)])
def test_adam_has_the_bits_of_torchs_own_kernel_for_bfloat16(kind: str, kernel: "torch._ops.OpOverload") -> None:
    theirs = Trained(kind)
    states = [[state] for state in theirs.state.values()]
    for step, gradient in enumerate(theirs.gradients, start=1):
        theirs.scalars.begin(step, 1.0)
        kernel([theirs.parameter], [gradient], *states, [], [theirs.scalars.number], **theirs.scalars.keywords)
    assert torch.equal(Trained(kind).train(None), torch.stack([theirs.parameter, *theirs.state.values()]))


@settings(max_examples=10)
@given(world_size=st.integers(1, 9), kind=st.sampled_from(sorted(KINDS)), seed=st.none() | st.integers(0, 9))
def test_slices_have_the_bits_of_the_whole(world_size: int, kind: str, seed: int | None) -> None:
    assert torch.equal(Trained(kind).train(seed, world_size), Trained(kind).train(seed))


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_the_bits_and_none_rounds_to_nearest(kind: str) -> None:
    first, again, other, nearest = (Trained(kind).train(seed) for seed in (1, 1, 2, None))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, nearest)
    apart, size = (first.float() - nearest.float()).abs(), nearest.float().abs()
    assert bool((apart <= 0.02 * size + 0.02).all()), "they are roundings of about the same numbers"


def test_small_updates_are_kept_in_the_mean_and_lost_by_rounding_to_nearest() -> None:
    """A parameter of 1 and steps of 1e-4, a twentieth of half the distance to the next number below."""
    assert _mean_after_small_steps(None) == 1.0
    assert abs(_mean_after_small_steps(5) - (1 - 0.01)) < 5e-4


def _mean_after_small_steps(seed: int | None) -> float:
    """Of parameters that begin as 1 and take 100 steps of 1e-4."""
    parameter, gradient = torch.ones(4096).bfloat16(), torch.full((4096,), 0.01).bfloat16()
    scalars = Scalars("sgd", {**SGD, "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0})
    update = WideUpdates(seed).slice(0, 0, parameter, {}, lambda: scalars.step, partial(slice_update, scalars=scalars))
    for step in range(1, 101):
        scalars.begin(step, 1.0)
        update(gradient)
    return float(parameter.double().mean())
