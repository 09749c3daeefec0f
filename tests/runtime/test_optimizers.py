"""One optimizer step from one state, against torch.optim, and on slices against the whole."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sambasim.collectives.slices import cut
from sambasim.optimizers import OPTIMIZERS
from sambasim.runtime.optimizers import Hyperparameters, Scalars, slice_update

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
    slice_update(parameter, states, scalars)(gradient)


def _start(states: tuple[str, ...], seed: int) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    parameter = torch.randn(NUMEL, generator=generator)
    gradients = [torch.randn(NUMEL, generator=generator) for _ in range(3)]
    return parameter, gradients, {state: torch.zeros(NUMEL) for state in states}


def _torch_optimizer(kind: str, parameter: Tensor, *, fused: bool) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.01, fused=fused)
    if kind == "adagrad":
        return torch.optim.Adagrad([parameter], lr=0.005, lr_decay=0.1, weight_decay=0.01, fused=fused)
    make: Callable[..., torch.optim.Optimizer] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]
    return make([parameter], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, fused=fused)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if OPTIMIZERS[kind].torch_name])
def test_three_steps_agree_with_torch_optim(kind: str, fused: bool) -> None:
    hyperparameters, states = KINDS[kind]
    ours, gradients, state = _start(states, seed=1)
    theirs = torch.nn.Parameter(ours.clone())
    optimizer = _torch_optimizer(kind, theirs, fused=fused)
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
        _apply(
            kind, whole[:numel], gradient[:numel], {n: t[:numel] for n, t in whole_state.items()}, step, hyperparameters
        )
        for a, b in cut(numel, world_size):
            own = {name: tensor[a:b] for name, tensor in sliced_state.items()}
            _apply(kind, sliced[a:b], gradient[a:b], own, step, hyperparameters)
    assert torch.equal(whole[:numel], sliced[:numel])
    for name in states:
        assert torch.equal(whole_state[name], sliced_state[name])
