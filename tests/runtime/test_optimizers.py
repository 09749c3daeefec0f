"""Optimizer steps against torch.optim, on slices, and of 16-bit parameters, rounded to nearest or stochastically."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sambasim.ir.program import MASTER
from sambasim.ir.types import cut
from sambasim.optimizers import OPTIMIZERS
from sambasim.runtime.values.mean import CHUNK_ELEMENTS
from sambasim.runtime.values.optimizers import (
    PIECE_ELEMENTS,
    Hyperparameters,
    Scalars,
    draw,
    master_update,
    round_stochastically,
    slice_update,
    wide_update,
)

NUMEL = 64 * 331

SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.01}
ADAM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
KINDS: dict[str, tuple[dict[str, float], tuple[str, ...]]] = {
    "sgd": (SGD, ("momentum",)),
    "adam": (ADAM, ("exp_avg", "exp_avg_sq")),
    "adamw": (ADAM, ("exp_avg", "exp_avg_sq")),
    "adagrad": ({"lr": 0.005, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.01}, ("sum",)),
    "lion": ({"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01}, ("exp_avg",)),
}


def _apply(
    kind: str, parameter: Tensor, gradient: Tensor, states: dict[str, Tensor], step: int, given: Hyperparameters
) -> None:
    scalars = Scalars(kind, given)
    scalars.begin(step, 1.0)
    slice_update(parameter, gradient, states, scalars)()


def _start(states: tuple[str, ...], seed: int) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    parameter = torch.randn(NUMEL, generator=generator)
    gradients = [torch.randn(NUMEL, generator=generator) for _ in range(3)]
    return parameter, gradients, {state: torch.zeros(NUMEL) for state in states}


_IN_TORCH: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, object]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.005, "lr_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if OPTIMIZERS[kind].torch_name])
def test_three_steps_agree_with_torch_optim(kind: str, fused: bool) -> None:
    hyperparameters, states = KINDS[kind]
    ours, gradients, state = _start(states, seed=1)
    theirs = torch.nn.Parameter(ours.clone())
    make, given = _IN_TORCH[kind]
    optimizer = make([theirs], weight_decay=0.01, fused=fused, **given)
    for step, gradient in enumerate(gradients, start=1):
        theirs.data.copy_(ours)  # from one state each time
        before = ours.clone()
        _apply(kind, ours, gradient, state, step, hyperparameters)
        theirs.grad = gradient.clone()
        optimizer.step()
        if fused:
            assert torch.equal(ours, theirs.data), "the same kernel gives the same bits"
        scale = torch.maximum(ours.abs(), (ours - before).abs())
        assert bool(((ours - theirs.data).abs() <= 4 * torch.finfo(torch.float32).eps * scale).all())


def test_every_optimizer_of_the_table_is_tested() -> None:
    assert set(KINDS) == set(OPTIMIZERS)
    assert all(states == tuple(OPTIMIZERS[kind].states) for kind, (_, states) in KINDS.items())


def test_lion_takes_the_steps_of_its_paper() -> None:
    """Program 1 of arXiv:2302.06675, in float64."""
    given, states = KINDS["lion"]
    ours, gradients, state = _start(states, seed=2)
    parameter, average = ours.double(), torch.zeros(NUMEL, dtype=torch.float64)
    for step, gradient in enumerate(gradients, start=1):
        _apply("lion", ours, gradient, state, step, given)
        update = torch.sign(given["beta1"] * average + (1 - given["beta1"]) * gradient)
        average = given["beta2"] * average + (1 - given["beta2"]) * gradient
        parameter -= given["lr"] * (update + given["weight_decay"] * parameter)
    torch.testing.assert_close(ours, parameter.float())
    torch.testing.assert_close(state["exp_avg"], average.float())


@settings(max_examples=20)
@given(world_size=st.integers(1, 9), kind=st.sampled_from(sorted(KINDS)), numel=st.integers(1, 331))
def test_slices_that_end_at_64_elements_have_the_bits_of_the_whole(world_size: int, kind: str, numel: int) -> None:
    hyperparameters, states = KINDS[kind]
    numel *= 64
    whole, gradients, whole_state = _start(states, seed=numel)
    sliced, _, sliced_state = _start(states, seed=numel)
    for step, gradient in enumerate(gradients, start=1):
        states_of_whole = {name: tensor[:numel] for name, tensor in whole_state.items()}
        _apply(kind, whole[:numel], gradient[:numel], states_of_whole, step, hyperparameters)
        for a, b in cut(numel, world_size):
            own = {name: tensor[a:b] for name, tensor in sliced_state.items()}
            _apply(kind, sliced[a:b], gradient[a:b], own, step, hyperparameters)
    assert torch.equal(whole[:numel], sliced[:numel])
    for name in states:
        assert torch.equal(whole_state[name], sliced_state[name])


@pytest.mark.parametrize("kind", KINDS)
def test_a_clipped_update_has_the_bits_of_one_by_the_smaller_gradient(kind: str) -> None:
    """In several pieces, each of which is multiplied just before its update."""
    hyperparameters, states = KINDS[kind]
    numel = 2 * CHUNK_ELEMENTS * torch.get_num_threads() + 64
    gradient, found = torch.randn(numel, generator=torch.Generator().manual_seed(5)), []
    for clips, reduced in ((True, gradient.clone()), (False, 0.3 * gradient)):
        scalars, parameter = Scalars(kind, hyperparameters), torch.ones(numel)
        state = {name: torch.zeros(numel) for name in states}
        scalars.factor = 0.3
        update = slice_update(parameter, reduced, state, scalars, clips=clips)
        scalars.begin(1, 1.0)
        update()
        found.append(torch.stack([parameter, reduced, *state.values()]))
    assert torch.equal(*found)


def test_a_step_that_overflowed_changes_nothing_and_the_next_one_does() -> None:
    parameter, gradient = torch.ones(64).bfloat16(), torch.ones(64).bfloat16()
    states = {MASTER: torch.zeros(64), "momentum": torch.zeros(64)}
    scalars = Scalars("sgd", SGD)
    update = master_update(parameter, gradient, states, scalars, [])
    for step, scalars.skips in enumerate((False, True, False), start=1):
        before = parameter.clone()
        scalars.begin(step, 1.0)
        update()
        assert torch.equal(parameter, before) is scalars.skips


DRAWS = 64 * 1024


def _rounded(values: Tensor) -> Tensor:
    out = torch.empty(values.numel(), dtype=torch.bfloat16)
    round_stochastically(values.clone(), draw(0, 1, 0, 0, 0, values.numel()), out)
    return out


@pytest.mark.parametrize("exact", [1 + 0.1 / 128, -(1 + 0.7 / 128), 3e-39, 1e30])
def test_the_mean_of_many_roundings_is_the_number(exact: float) -> None:
    values = torch.full((DRAWS,), exact)
    number = values[0].double()
    rounded = _rounded(values).double()
    below, above = sorted(set(rounded.tolist()))
    assert below < number < above
    step = above - below
    # Of a draw with the probability p the standard deviation is at most a half, and of the mean of n less by √n.
    assert abs(rounded.mean() - number) < 5 * 0.5 * step / DRAWS**0.5


def test_what_bfloat16_holds_stays() -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rounded = _rounded(every.float())
    numbers = ~every.isnan()
    assert torch.equal(rounded[numbers].view(torch.int16), every[numbers].view(torch.int16))
    assert bool(rounded[~numbers].isnan().all())


@given(cuts=st.lists(st.integers(0, DRAWS // 64), max_size=5), seed=st.integers(0, 2**64 - 1))
def test_pieces_draw_what_the_whole_does(cuts: list[int], seed: int) -> None:
    ends = [0, *sorted(64 * cut for cut in cuts), DRAWS]
    pieces = [draw(seed, 7, 3, 1, start, stop) for start, stop in pairwise(ends)]
    assert torch.equal(torch.cat(pieces), draw(seed, 7, 3, 1, 0, DRAWS))


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
        scalars, scratch, place = self.scalars, list[Tensor](), torch.empty_like(self.parameter)
        slices = cut(self.parameter.numel(), world_size)
        by_slice = []
        for start, stop in slices:
            states = {name: state[start:stop] for name, state in self.state.items()}
            own = self.parameter[start:stop], place[start:stop]
            by_slice.append(wide_update(*own, states, scalars, scratch, seed, [(0, 0, start)]))
        for step, gradient in enumerate(self.gradients, start=1):
            scalars.begin(step, 1.0)
            place.copy_(gradient)
            for update in by_slice:
                update()
        return torch.stack([self.parameter, *self.state.values()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_is_one_of_float32_rounded_once(kind: str, dtype: torch.dtype) -> None:
    trained, expected = Trained(kind, dtype), Trained(kind, dtype)
    for step, gradient in enumerate(expected.gradients, start=1):
        wide = expected.parameter.float()
        states = {name: state.float() for name, state in expected.state.items()}
        expected.scalars.begin(step, 1.0)
        slice_update(wide, gradient.float(), states, expected.scalars)()
        expected.parameter.copy_(wide)
        for name, state in states.items():
            expected.state[name].copy_(state)
    assert torch.equal(trained.train(None), torch.stack([expected.parameter, *expected.state.values()]))


@pytest.mark.parametrize("kind", KINDS)
def test_master_weights_are_those_of_float32_and_parameters_their_roundings(kind: str) -> None:
    """With scaled gradients, in slices."""
    trained, expected = Trained(kind), Trained(kind)
    states = {MASTER: torch.zeros(TRAINED_NUMEL), **{name: torch.zeros(TRAINED_NUMEL) for name in trained.states}}
    wide, others = expected.parameter.float(), {name: torch.zeros(TRAINED_NUMEL) for name in trained.states}
    scratch, place = list[Tensor](), torch.empty_like(trained.parameter)
    updates = []
    for a, b in cut(TRAINED_NUMEL, 3):
        own = {name: one[a:b] for name, one in states.items()}
        updates.append(master_update(trained.parameter[a:b], place[a:b], own, trained.scalars, scratch))
    trained.scalars.factor = 1 / 16
    for step, gradient in enumerate(expected.gradients, start=1):
        expected.scalars.begin(step, 1.0)
        slice_update(wide, gradient.float(), others, expected.scalars)()
        trained.scalars.begin(step, 1.0)
        place.copy_(16 * gradient)
        for update in updates:
            update()
    assert torch.equal(states.pop(MASTER), wide)
    assert all(torch.equal(states[name], others[name]) for name in states)
    assert torch.equal(trained.parameter, wide.bfloat16())


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
    """A parameter of 1 and 100 steps of 1e-4, a twentieth of half the distance to the next number below."""
    means = []
    for seed in (None, 5):
        parameter, gradient = torch.ones(4096).bfloat16(), torch.full((4096,), 0.01).bfloat16()
        scalars = Scalars("sgd", {**SGD, "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0})
        update = wide_update(parameter, gradient, {}, scalars, [], seed, [(0, 0, 0)])
        for step in range(1, 101):
            scalars.begin(step, 1.0)
            update()
        means.append(float(parameter.double().mean()))
    assert means == [1.0, pytest.approx(1 - 0.01, abs=5e-4)]
