"""Optimizer steps against torch.optim, on slices, and of 16-bit parameters, rounded to nearest or stochastically."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sambasim.ir.program import MASTER, Member, ParameterGroup
from sambasim.ir.types import align, cut
from sambasim.optimizers import OPTIMIZERS, Fused
from sambasim.runtime.values.mean import CHUNK_ELEMENTS, parts_of
from sambasim.runtime.values.rounding import draw, round_stochastically
from sambasim.runtime.values.slices import (
    PIECE_ELEMENTS,
    Place,
    Scalars,
    joined,
    narrow_update,
    places_of,
    slice_update,
)

NUMEL = 2 * PIECE_ELEMENTS + 64

BOTH = {"weight_decay": 0.01, "maximize": False}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False, **BOTH}
MOMENTS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, **BOTH}
ADAM = {**MOMENTS, "amsgrad": True}
RMSPROP = {"lr": 1e-3, "alpha": 0.9, "eps": 1e-8, "momentum": 0.9, "centered": True, **BOTH, "maximize": True}
NADAM = {**MOMENTS, "momentum_decay": 4e-3, "decoupled_weight_decay": True}
KINDS: dict[str, tuple[dict[str, float], tuple[str, ...]]] = {
    "sgd": (SGD, ("momentum",)),
    "adam": (ADAM, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    "adamw": (ADAM, ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    "adagrad": ({"lr": 0.005, "lr_decay": 0.1, "eps": 1e-10, **BOTH}, ("sum",)),
    "rmsprop": (RMSPROP, ("square_avg", "grad_avg", "momentum")),
    "adamax": (MOMENTS, ("exp_avg", "exp_inf")),
    "nadam": (NADAM, ("exp_avg", "exp_avg_sq")),
    "lion": ({"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01}, ("exp_avg",)),
}
_IN_TORCH: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, object]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.005, "lr_decay": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 1e-3, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "alpha": 0.9, "momentum": 0.9, "centered": True, "maximize": True}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-3}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-3, "decoupled_weight_decay": True}),
}


class Trained:
    """A parameter and states that begin alike for equal `numel`, three gradients, and updates of them."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.bfloat16, numel: int = NUMEL) -> None:
        hyperparameters, states = KINDS[kind]
        generator = torch.Generator().manual_seed(numel)
        self.parameter = torch.randn(numel, generator=generator).to(dtype)
        self.gradients = [torch.randn(numel, generator=generator).to(dtype) for _ in range(3)]
        self.states = {state: torch.zeros(numel, dtype=dtype) for state in states}
        self.scalars = Scalars(OPTIMIZERS[kind], hyperparameters)

    def stepper(self, seed: int | None = None, world_size: int = 1) -> Callable[[Tensor], None]:
        """What takes the next step by a gradient, in as many slices as there are replicas."""
        scalars, scratch, place = self.scalars, list[Tensor](), torch.empty_like(self.parameter)
        updates = []
        for a, b in cut(self.parameter.numel(), world_size):
            operands = self.parameter[a:b], place[a:b], {name: state[a:b] for name, state in self.states.items()}
            if self.parameter.dtype is torch.float32:
                updates.append(slice_update(*operands, scalars))
            else:
                updates.append(narrow_update(*operands, scalars, scratch, seed, [Place(0, b - a, 0, a)]))

        def step(gradient: Tensor) -> None:
            scalars.begin(scalars.step + 1, 1.0)
            place.copy_(gradient)
            for update in updates:
                update()

        return step

    def train(self, seed: int | None = None, world_size: int = 1) -> Tensor:
        """Parameter and states after three steps."""
        step = self.stepper(seed, world_size)
        for gradient in self.gradients:
            step(gradient)
        return self.values()

    def values(self) -> Tensor:
        return torch.stack([self.parameter, *self.states.values()])


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", _IN_TORCH)
def test_three_steps_agree_with_torch_optim(kind: str, fused: bool) -> None:
    ours = Trained(kind, torch.float32)
    theirs, step = torch.nn.Parameter(ours.parameter.clone()), ours.stepper()
    make, given_to_torch = _IN_TORCH[kind]
    has_kernel = isinstance(update := OPTIMIZERS[kind].update, Fused) and update.is_kernel
    chosen = {"fused": fused} if has_kernel else {"foreach": not fused}
    optimizer = make([theirs], weight_decay=0.01, **chosen, **given_to_torch)
    for gradient in ours.gradients:
        before = ours.parameter.clone()
        theirs.data.copy_(before)  # from one state each time
        step(gradient)
        theirs.grad = gradient.clone()
        optimizer.step()
        if fused:
            assert torch.equal(ours.parameter, theirs.data), "the same kernel gives the same bits"
        scale = torch.maximum(ours.parameter.abs(), (ours.parameter - before).abs())
        assert bool(((ours.parameter - theirs.data).abs() <= 4 * torch.finfo(torch.float32).eps * scale).all())


@pytest.mark.parametrize("kind", KINDS)
def test_a_bound_of_each_element_is_that_of_torch(kind: str) -> None:
    bound = 0.25
    ours, clamped = Trained(kind, torch.float32), Trained(kind, torch.float32)
    ours.scalars.hyperparameters = {**KINDS[kind][0], "max_grad_value": bound}
    clamped.gradients = [gradient.clamp(-bound, bound) for gradient in ours.gradients]
    assert torch.equal(ours.train(), clamped.train())
    assert not torch.equal(ours.values(), Trained(kind, torch.float32).train())


def test_every_optimizer_of_the_table_is_tested() -> None:
    assert {kind: states for kind, (_, states) in KINDS.items()} == {
        kind: tuple(optimizer.states) for kind, optimizer in OPTIMIZERS.items()
    }
    assert set(_IN_TORCH) == {kind for kind, optimizer in OPTIMIZERS.items() if optimizer.torch_name}


def test_lion_takes_the_steps_of_its_paper() -> None:
    """Program 1 of arXiv:2302.06675, in float64."""
    settings, ours = KINDS["lion"][0], Trained("lion", torch.float32)
    parameter, average = ours.parameter.double(), torch.zeros(NUMEL, dtype=torch.float64)
    for gradient in ours.gradients:
        update = torch.sign(settings["beta1"] * average + (1 - settings["beta1"]) * gradient)
        average = settings["beta2"] * average + (1 - settings["beta2"]) * gradient
        parameter -= settings["lr"] * (update + settings["weight_decay"] * parameter)
    torch.testing.assert_close(ours.train(), torch.stack([parameter, average]).float())


_ANY = {"world_size": st.integers(1, 9), "kind": st.sampled_from(sorted(KINDS)), "lines": st.integers(1, 331)}


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 0), (torch.bfloat16, 2 * PIECE_ELEMENTS)])
@settings(max_examples=15)
@given(**_ANY, seed=st.none() | st.integers(0, 9))
def test_slices_that_end_at_64_elements_have_the_bits_of_the_whole(
    dtype: torch.dtype, least: int, world_size: int, kind: str, lines: int, seed: int | None
) -> None:
    numel = least + 64 * lines
    sliced, whole = (Trained(kind, dtype, numel).train(seed, replicas) for replicas in (world_size, 1))
    assert torch.equal(sliced, whole)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "adagrad"])
def test_parameters_of_any_size_have_the_bits_of_torchs_kernels(kind: str, world_size: int) -> None:
    """Kernels round the last elements of a tensor, 16 or fewer, differently from the same elements amid others."""
    sizes, members = (2, 64, 1, 128, 79, 200, 15), list[Member]()
    for size in sizes:
        start = align(members[-1].start + members[-1].numel, 64) if members else 0
        members.append(Member(f"p{start}", f"g{start}", start, size, len(members)))
    numel = align(members[-1].start + size, 64)
    group = ParameterGroup("all", "float32", numel, tuple(members), 0, {})
    ours, spans = Trained(kind, torch.float32, numel), [slice(one.start, one.start + one.numel) for one in members]
    theirs = [torch.nn.Parameter(ours.parameter[span].clone()) for span in spans]
    make, given_to_torch = _IN_TORCH[kind]
    optimizer = make(theirs, weight_decay=0.01, fused=True, **given_to_torch)
    flat = torch.zeros(numel)
    updates = [
        slice_update(
            ours.parameter[a:b],
            flat[a:b],
            {name: state[a:b] for name, state in ours.states.items()},
            ours.scalars,
            places=joined(places_of(parts_of(group, ours.parameter, (a, b)), a)),
        )
        for a, b in cut(numel, world_size)
    ]
    for number, gradient in enumerate(ours.gradients, 1):
        flat.copy_(gradient)
        ours.scalars.begin(number, 1.0)
        for update_slice in updates:
            update_slice()
        for one, span in zip(theirs, spans, strict=True):
            one.grad = gradient[span].clone()
        optimizer.step()
    for one, span in zip(theirs, spans, strict=True):
        assert torch.equal(ours.parameter[span], one.data)
        states = [torch_state for torch_state in optimizer.state[one].values() if torch_state.shape == one.shape]
        found = {tuple(state[span].tolist()) for state in ours.states.values()}
        assert found == {tuple(state.tolist()) for state in states}


@pytest.mark.parametrize("kind", KINDS)
def test_a_clipped_update_has_the_bits_of_one_by_the_smaller_gradient(kind: str) -> None:
    """In several pieces, each of which is multiplied just before its update."""
    numel = 2 * CHUNK_ELEMENTS * torch.get_num_threads() + 64
    gradient, results = torch.randn(numel, generator=torch.Generator().manual_seed(5)), []
    for scales, reduced in ((True, gradient.clone()), (False, 0.3 * gradient)):
        trained = Trained(kind, torch.float32, numel)
        trained.scalars.factor = 0.3
        update = slice_update(trained.parameter, reduced, trained.states, trained.scalars, scales=scales)
        trained.scalars.begin(1, 1.0)
        update()
        results.append(torch.stack([*trained.values(), reduced]))
    assert torch.equal(*results)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_each_step_is_one_of_float32_rounded_once(kind: str, dtype: torch.dtype) -> None:
    expected = Trained(kind, dtype)
    for step, gradient in enumerate(expected.gradients, start=1):
        wide, states = expected.parameter.float(), {name: state.float() for name, state in expected.states.items()}
        expected.scalars.begin(step, 1.0)
        slice_update(wide, gradient.float(), states, expected.scalars)()
        expected.parameter.copy_(wide)
        for name, state in states.items():
            expected.states[name].copy_(state)
    assert torch.equal(Trained(kind, dtype).train(), expected.values())


@pytest.mark.parametrize("kind", KINDS)
def test_master_weights_are_those_of_float32_and_parameters_their_roundings(kind: str) -> None:
    """With scaled gradients, in slices. A step that overflowed changes nothing, and the next one does."""
    narrow, wide = Trained(kind), Trained(kind, torch.float32)
    wide.parameter.copy_(narrow.parameter)
    states = {name: torch.zeros(NUMEL) for name in (MASTER, *narrow.states)}
    scratch, place, updates = list[Tensor](), torch.empty_like(narrow.parameter), []
    for a, b in cut(NUMEL, 3):
        own = {name: state[a:b] for name, state in states.items()}
        updates.append(narrow_update(narrow.parameter[a:b], place[a:b], own, narrow.scalars, scratch))
    narrow.scalars.factor, step = 1 / 16, wide.stepper()
    for number, gradient in enumerate(narrow.gradients, start=1):
        step(gradient.float())
        narrow.scalars.begin(number, 1.0)
        for narrow.scalars.skips in (True, False) if number > 1 else (False,):
            before = narrow.parameter.clone()
            place.copy_(16 * gradient)
            for update in updates:
                update()
            assert torch.equal(narrow.parameter, before) is narrow.scalars.skips
    assert torch.equal(torch.stack([*states.values()]), wide.values())
    assert torch.equal(narrow.parameter, wide.parameter.bfloat16())


@pytest.mark.parametrize(("kind", "kernel"), [("adam", torch._fused_adam_), ("adamw", torch._fused_adamw_)])
def test_adam_has_the_bits_of_torchs_own_kernel_for_bfloat16(kind: str, kernel: "torch._ops.OpOverload") -> None:
    theirs = Trained(kind)
    states = [[state] for state in theirs.states.values()]
    for step, gradient in enumerate(theirs.gradients, start=1):
        theirs.scalars.begin(step, 1.0)
        kernel([theirs.parameter], [gradient], *states, [theirs.scalars.numbers["step"]], **theirs.scalars.keywords)
    assert torch.equal(Trained(kind).train(), theirs.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides_the_bits_and_none_rounds_to_nearest(kind: str) -> None:
    first, again, other, nearest = (Trained(kind).train(seed) for seed in (1, 1, 2, None))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, nearest)
    if kind == "rmsprop":
        return  # it divides by a variance that is the small difference of two roundings
    apart, size = (first.float() - nearest.float()).abs(), nearest.float().abs()
    assert bool((apart <= 0.02 * size + 0.02).all()), "they are roundings of about the same numbers"


def test_small_updates_are_kept_in_the_mean_and_lost_by_rounding_to_nearest() -> None:
    """A parameter of 1 and 100 steps of 1e-4, a twentieth of half the distance to the next number below."""
    means = []
    for seed in (None, 5):
        trained = Trained("sgd", numel=4096)
        trained.parameter.fill_(1)
        trained.scalars.change({**SGD, "lr": 0.01, "momentum": 0.0, "weight_decay": 0.0})
        step = trained.stepper(seed)
        for _ in range(100):
            step(torch.full((4096,), 0.01))
        means.append(float(trained.parameter.double().mean()))
    assert means == [1.0, pytest.approx(1 - 0.01, abs=5e-4)]
