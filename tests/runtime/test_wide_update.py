"""Optimizer steps on what is stored in 16 bits: float32 inside, one rounding, and the same bits in any slices."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sambasim.collectives.slices import cut
from sambasim.runtime.optimizers import Scalars, slice_update
from sambasim.runtime.wide_update import PIECE_ELEMENTS, WideUpdates
from tests.runtime.test_optimizers import KINDS, SGD

NUMEL = 2 * PIECE_ELEMENTS + 64


class Trained:
    """Parameters and states that begin alike for equal `numel`, and what updates them."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.bfloat16, numel: int = NUMEL) -> None:
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
