"""One optimizer step on a slice of a group, from the table `sambasim.optimizers`.

Updates run on any slice of a group whose ends are multiples of 64 elements, with the bits of an update of the whole
group, and of torch's update of each parameter: kernels round the last elements of a tensor differently, so tensors end
where parameters do. 16-bit parameters and states are widened to float32, updated, and rounded once, where torch has no
kernel that does so itself: its fused SGD for CPUs does not change such parameters (torch 2.13). With master weights,
their float32 copy is updated, and rounded.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from sambasim.ir.program import MASTER, STEP
from sambasim.ir.types import pieces
from sambasim.optimizers import Fused, NumberOfStep, OptimizerEntry
from sambasim.runtime.values.mean import CHUNK_ELEMENTS, Part
from sambasim.runtime.values.rounding import draw, round_stochastically

Arguments: TypeAlias = Mapping[str, float | int | bool]

Hyperparameters: TypeAlias = Mapping[str, float | bool]
States: TypeAlias = Mapping[str, Tensor]
SliceUpdate: TypeAlias = Callable[[], object]
"""Updates one slice of a group's parameters and states in place, by the mean gradient of that slice."""


def _momenta_before(step: int, given: Hyperparameters) -> float:
    """In float32, as torch multiplies them."""
    last = 110 / -math.log(given["beta1"] or 0.5)  # then the product is 0
    steps = np.arange(1, min(step, last + 1))
    momenta = given["beta1"] * (1.0 - 0.5 * 0.96 ** (steps * given["momentum_decay"]))
    return float(np.multiply.reduce(momenta.astype(np.float32), initial=np.float32(1)))


_NUMBERS: Mapping[NumberOfStep, Callable[[int, Hyperparameters], float]] = {
    "step": lambda step, given: step,
    "steps before": lambda step, given: step - 1,
    "momenta before": _momenta_before,
}


class Scalars:
    """The scalar arguments of one optimizer's updates: hyperparameters, learning rate and step number."""

    def __init__(self, entry: OptimizerEntry, hyperparameters: Hyperparameters) -> None:
        self.entry = entry
        self.step = 0
        self.change(hyperparameters)
        self._is_fused = isinstance(entry.update, Fused)
        self._of_step = entry.update.numbers if isinstance(entry.update, Fused) else {}
        self.numbers = {name: torch.zeros(()) for name in self._of_step}
        self.keywords: dict[str, float | bool] = {}
        self.factor = 1.0
        """By what updates multiply gradients: that of clipping over the count and, with master weights, the scale."""
        self.skips = False
        """Whether gradients have overflowed: updates of master weights, which such programs have, then do nothing."""
        self.given: tuple[Hyperparameters, float, bool] | None = None
        """From which `keywords` follow: another object where they have changed."""

    def change(self, hyperparameters: Hyperparameters) -> None:
        self.hyperparameters = hyperparameters
        self.kept = self.entry.kept_states(hyperparameters)
        """The states that updates use."""
        self._taken = self.entry.taken(hyperparameters)

    def begin(self, step: int, rate: float, first: int | None = 1) -> None:
        """Begin step `step` (from 1); `rate` multiplies the learning rate. `first`: the one that begins the states."""
        self.step = step
        given = self.hyperparameters, rate, step == first
        for name, number in self.numbers.items():
            number.fill_(_NUMBERS[self._of_step[name]](step, self.hyperparameters))
        if given != self.given:
            self.given = given
            self.keywords.clear()
            self.keywords.update(self._taken, lr=float(self.hyperparameters["lr"]) * rate)
            if isinstance(self.entry.update, Fused) and self.entry.update.asks_for_first:
                self.keywords["is_first_step"] = step == first
        if not self._is_fused:
            self.keywords[STEP] = float(step)


def divides_exactly(dtype: str) -> bool:
    """Whether an update that divides its gradient has the bits of a division before it, which rounds narrow dtypes."""
    return dtype in ("float32", "float64")


class Place(NamedTuple):
    """Elements `start` to `stop` of a slice, of one parameter or of several; for random bits, the number of the first
    one and, of it, the element at `start`."""

    start: int
    stop: int
    number: int = 0
    offset: int = 0


def places_of(parts: Iterable[Part], start: int) -> list[Place]:
    """Of parts of a group, in its slice from element `start`."""
    begins = ((member.start + offset - start, part.numel(), member.block, offset) for member, offset, part in parts)
    return [Place(begin, begin + numel, number, offset) for begin, numel, number, offset in begins]


def joined(places: Iterable[Place]) -> list[Place]:
    """Those that follow one another as one: where a parameter ends at a multiple of 64, the next one follows."""
    runs: list[Place] = []
    for place in places:
        follows = bool(runs) and runs[-1].stop == place.start
        runs.append(runs.pop()._replace(stop=place.stop) if follows else place)
    return runs


def slice_update(
    parameter: Tensor,
    gradient: Tensor,
    states: States,
    scalars: Scalars,
    *,
    divisor: int = 1,
    scales: bool = False,
    places: Sequence[Place] | None = None,
) -> SliceUpdate:
    """A function that updates `parameter` and `states` by `gradient`, all flat, with the current values of `scalars`.
    It first divides the gradient by `divisor` or, if it `scales`, multiplies it by their factor, in place.
    `places`: the tensors that it updates; None if all is one."""
    if parameter.numel() == 0:
        return lambda: None
    tensors = [Place(0, parameter.numel())] if places is None else places
    update, keywords, bounds = scalars.entry.update, scalars.keywords, "max_grad_value" in scalars.hyperparameters
    divides = isinstance(update, Fused) and update.is_kernel and not bounds  # by itself
    # A gradient that is multiplied is read twice: in pieces that stay in the caches.
    limit = CHUNK_ELEMENTS * torch.get_num_threads() if scales or bounds else parameter.numel()
    spans = pieces(0, parameter.numel(), limit)
    if not isinstance(update, Fused):  # its operators are called one by one, and divide a tensor among threads
        limit = PIECE_ELEMENTS * torch.get_num_threads()
        even = parameter.numel() // limit * limit
        spans = (*pieces(0, even, limit), *pieces(even, parameter.numel(), PIECE_ELEMENTS))

    def scale(gradient: Tensor) -> None:
        if divisor != 1 and not divides:
            gradient.div_(divisor)
        if scales and scalars.factor != 1.0:
            gradient.mul_(scalars.factor)
        if bounds:
            bound = scalars.hyperparameters["max_grad_value"]
            gradient.clamp_(-bound, bound)

    def bound_to(a: int, b: int) -> SliceUpdate:
        inside = [
            slice(max(a, place.start), min(b, place.stop)) for place in tensors if place.start < b and a < place.stop
        ]
        parameters, gradients = [parameter[run] for run in inside], [gradient[run] for run in inside]
        own = [{name: state[run] for name, state in states.items()} for run in inside]
        if isinstance(update, Fused):
            return _fused(update, scalars, parameters, gradients, own, divisor if divides else 1)
        return partial(update, parameters[0], gradients[0], own[0], keywords)  # only kernels have several `places`

    parts = [(gradient[a:b], bound_to(a, b)) for a, b in spans]
    changes = scales or bounds or (divisor != 1 and not divides)
    if len(parts) == 1 and not changes:  # one call less, which a small update notices
        return parts[0][1]

    def update_slice() -> None:
        for of_gradient, step in parts:
            if changes:
                scale(of_gradient)
            step()

    return update_slice


_scalar = cache(torch.tensor)


def _fused(
    update: Fused,
    scalars: Scalars,
    parameters: list[Tensor],
    gradients: list[Tensor],
    states: Sequence[States],
    divisor: int,
) -> SliceUpdate:
    if is_kernel := update.is_kernel:
        divided = None if divisor == 1 else _scalar(float(divisor))
        function: Callable[..., object] = partial(getattr(torch, update.function), grad_scale=divided)
    else:
        name = update.function.rpartition(".")[2]
        function = partial(getattr(import_module(update.function), name), foreach=False)
    call = function
    given: object = None  # which it takes

    def step() -> None:
        nonlocal call, given
        if given is not scalars.given or not is_kernel:  # one that is not changes the numbers
            given = scalars.given
            # A kernel writes also states that it does not read.
            operands = [[own[name] for own in states] if name in scalars.kept else [] for name in scalars.entry.states]
            operands += [[n if is_kernel else n.clone() for _ in states] for n in scalars.numbers.values()]
            call = partial(function, parameters, gradients, *operands, **scalars.keywords)
        call()

    return step


PIECE_ELEMENTS = 32_768
"""Elements that a thread updates at a time, so that they stay in a core's cache: torch does not divide so few."""


def narrow_update(
    parameter: Tensor,
    narrow_gradient: Tensor,
    states: States,
    scalars: Scalars,
    scratch: list[Tensor],
    seed: int | None = None,
    places: Sequence[Place] | None = None,
) -> SliceUpdate:
    """As `slice_update`, computed in float32, for parameters of 16 bits. With master weights, first copies of them, all
    states are float32, and only parameters are rounded. `scratch`: float32 buffers that all slices share; `seed`: None
    rounds to nearest. `places`: None if all is one."""
    masters, own = states.get(MASTER), {name: state for name, state in states.items() if name != MASTER}
    stored = [parameter] if masters is not None else [parameter, *own.values()]
    limit = PIECE_ELEMENTS if masters is None else CHUNK_ELEMENTS * torch.get_num_threads()
    while len(scratch) <= len(stored):
        scratch.append(torch.empty(limit, dtype=torch.float32))

    def rounded(tensor: int, value: Tensor, a: int, b: int, number: int, offset: int) -> Callable[[], object]:
        to = stored[tensor][a:b]
        if seed is None:
            return partial(to.copy_, value)
        return lambda: round_stochastically(value, draw(seed, scalars.step, number, tensor, offset, offset + b - a), to)

    updates = []
    for start, stop, number, offset in [Place(0, parameter.numel())] if places is None else places:
        for a, b in pieces(start, stop, limit):
            gradient, *wide = (buffer[: b - a] for buffer in scratch[: 1 + len(stored)])
            copies = [(value, whole[a:b]) for whole, value in zip(stored, wide, strict=True)]
            of_states = dict(zip(own, wide[1:], strict=False))
            if masters is not None:
                wide, copies, of_states = [masters[a:b]], [], {name: state[a:b] for name, state in own.items()}
            compute = slice_update(wide[0], gradient, of_states, scalars, scales=masters is not None)
            roundings = [rounded(at, value, a, b, number, offset + a - start) for at, value in enumerate(wide)]
            updates.append((narrow_gradient[a:b], gradient, copies, compute, roundings))

    def update_slice() -> None:
        if masters is not None and scalars.skips:
            return
        if masters is not None and scalars.step == 1:
            masters.copy_(parameter)
        used = len(stored) if scalars.kept else 1
        for narrow, gradient, copies, compute, roundings in updates:
            if masters is None and scalars.factor != 1.0:
                narrow.mul_(scalars.factor)  # in its own dtype, as torch does
            gradient.copy_(narrow)
            for value, place in copies[:used]:
                value.copy_(place)
            compute()
            for round_piece in roundings[:used]:
                round_piece()

    return update_slice
