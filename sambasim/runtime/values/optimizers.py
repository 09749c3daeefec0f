"""OPT: the optimizers of a program on the groups in a device's memory, their runtime arguments, and averages."""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from torch import Tensor

from sambasim.errors import OptionError
from sambasim.ir.dataflow import is_clipped
from sambasim.ir.program import AVERAGE, EMA_PREFIX, LOSS_SCALE, MASTER, ROUNDING_SEED, ParameterGroup, Program
from sambasim.ir.types import pieces
from sambasim.optimizers import Fused
from sambasim.options.training import EmaOptions, OptimizerOptions
from sambasim.runtime.values.mean import CHUNK_ELEMENTS, parts_of, total_norm
from sambasim.runtime.values.memory import DeviceMemory
from sambasim.runtime.values.operators import entry_of
from sambasim.runtime.values.slices import (
    Hyperparameters,
    Place,
    Scalars,
    SliceUpdate,
    divides_exactly,
    joined,
    narrow_update,
    places_of,
    slice_update,
)

Arguments: TypeAlias = Mapping[str, float | int | bool]

Begun: TypeAlias = dict[int, int]
"""By number of an optimizer, the first step that wrote its states: 0 if they were loaded; none while they are zeros."""


def bind_arguments(
    program: Program, options: OptimizerOptions, world_size: int, rank: int, seed: int, ema: EmaOptions | None = None
) -> Arguments:
    """The runtime arguments that a run sets; others have the program's defaults."""
    known = {argument.name for argument in program.runtime_arguments}
    of_run: dict[str, float | int | bool] = {
        f"{optimizer.name}__{name}": value
        for optimizer, update in zip(program.optimizers, options.updates(), strict=True)
        for name, value in update.hyperparameters().items()
    }
    of_run |= {"dp_scale_factor": world_size, "dp_replica": rank} if program.data_parallel else {}
    of_run |= {ROUNDING_SEED: seed} if ROUNDING_SEED in known else {}
    of_run |= {f"{EMA_PREFIX}{name}": value for name, value in (ema.numbers() if ema else {}).items()}
    if unknown := sorted(of_run.keys() - known):
        what = f"the optimizer {unknown[0].replace('__', ' takes no ', 1)}"
        raise OptionError(what, remedy="leave it out: `sambasim inspect PEF --all` lists the arguments of a run")
    return of_run


def weight_in_average(step: int, numbers: Arguments) -> float | None:
    """The weight of the parameters after `step` (from 1) in their average: None if it stays, 1 if it begins. That of a
    mean is rounded to float32, as by torch.optim.swa_utils."""
    count, rest = divmod(step - int(numbers["start"]), int(numbers["every"]))
    decay = float(numbers["decay"])
    if count < 0 or rest:
        return None
    if count == 0 or not decay:
        return float(np.float32(1) / np.float32(1 + count))
    return 1 - (min(decay, (1 + count) / (10 + count)) if numbers["warmup"] else decay)


def take_into(average: Tensor, value: Tensor, weight: float | None) -> None:
    if weight == 1.0:
        average.copy_(value)
    elif weight is not None:
        average.lerp_(value.to(average.dtype), weight)


_TORCH_CLIP_EPSILON = 1e-6


class Optimizers:
    """OPT of all groups, on the parameters and states in `memory`. `changed`: arguments without the default value;
    `begun`: shared by the ranks of a replica; whoever writes states adds their optimizer."""

    def __init__(
        self, memory: DeviceMemory, changed: Arguments = MappingProxyType({}), begun: Begun | None = None
    ) -> None:
        self._program, self._memory, self._scalars = memory.program, memory, list[Scalars]()
        program = memory.program
        arguments = {**{argument.name: argument.default for argument in program.runtime_arguments}, **changed}
        for optimizer in program.optimizers:
            prefix = f"{optimizer.name}__"
            given = {name.removeprefix(prefix): arguments[name] for name in arguments if name.startswith(prefix)}
            self._scalars.append(Scalars(entry_of(optimizer), given))
        self.begun: Begun = {} if begun is None else begun
        seed = arguments.get(ROUNDING_SEED)
        self._rounding_seed = None if seed is None else int(seed)
        self._scratch: list[Tensor] = []
        self.scales_loss, self.loss_scale = LOSS_SCALE in arguments, 1.0
        self.mean_count = 1.0
        prefix = EMA_PREFIX
        self._ema = {name.removeprefix(prefix): arguments[name] for name in arguments if name.startswith(prefix)}
        self.weight_in_average: float | None = None
        """That of what this step trains, see `weight_in_average`."""
        self._has_masters = all(MASTER in optimizer.states for optimizer in program.optimizers)
        self._scales_gradients = is_clipped(program) or program.count is not None

    def begin(self, step: int, rate: float, loss_scale: float = 1.0) -> None:
        begun = self.begun
        for index, scalars in enumerate(self._scalars):
            first = begun.get(index)
            if first is None:
                if scalars.kept:
                    first = begun[index] = step
            elif first == step and not scalars.kept:  # it begins again, with other hyperparameters
                first = None
                del begun[index]
            scalars.begin(step, rate, first)
        self.loss_scale = loss_scale
        self.weight_in_average = weight_in_average(step, self._ema) if self._ema else None

    def skips(self, norm: float) -> bool:
        """Whether gradients of this norm have overflowed, so that the update must be skipped."""
        return self.scales_loss and not math.isfinite(norm)

    def clip(self, square_sums: Iterable[float]) -> float:
        """Clip gradients by the norm of these, as torch does, in the updates of this step. Returns the norm, of scaled
        gradients without the scale, of counted ones of the mean."""
        scale = self.loss_scale * self.mean_count
        norm = total_norm(square_sums) / scale
        bound, skips = self._scalars[0].hyperparameters.get("max_grad_norm"), self.skips(norm)
        self._scale_gradients(1.0 if bound is None else min(1.0, bound / (norm + _TORCH_CLIP_EPSILON)))
        for scalars in self._scalars:
            scalars.skips = skips
        return norm

    def divide_by(self, mean_count: float) -> None:
        """In the updates of this step. `mean_count`: what a pass counts, in the mean over all of the step."""
        self.mean_count = mean_count
        self._scale_gradients(1.0)

    def _scale_gradients(self, factor: float) -> None:
        for scalars in self._scalars:
            scalars.factor = factor / (self.mean_count * (self.loss_scale if self._has_masters else 1.0))

    def slice(self, group: ParameterGroup, start: int, stop: int, gradient: Tensor, divisor: int = 1) -> SliceUpdate:
        """A function that updates elements `start` to `stop` of `group`, multiples of 64, by `gradient`, in every step.
        In place, it clips the gradient or divides it by `divisor`: 1 unless the dtype `divides_exactly`."""
        if not self._ema:
            return self._step_of(group, start, stop, gradient, divisor)
        scalars, averages = self._scalars[group.optimizer], self._memory.region(group, AVERAGE)
        weights = self._memory.region(group, MASTER if self._has_masters else "parameter")
        steps = [  # in pieces: what is averaged is still in the caches
            (self._step_of(group, a, b, gradient[a - start : b - start], divisor), averages[a:b], weights[a:b])
            for a, b in pieces(start, stop, CHUNK_ELEMENTS)
        ]

        def update_slice() -> None:
            weight = None if scalars.skips else self.weight_in_average
            for step, average, trained in steps:
                step()
                take_into(average, trained, weight)

        return update_slice

    def _step_of(self, group: ParameterGroup, start: int, stop: int, gradient: Tensor, divisor: int) -> SliceUpdate:
        memory, scalars = self._memory, self._scalars[group.optimizer]
        parameter = memory.region(group, "parameter")[start:stop]
        names = self._program.optimizers[group.optimizer].states
        states = {name: memory.region(group, name)[start:stop] for name in names if name != AVERAGE}
        seed = None if MASTER in states else self._rounding_seed
        places = places_of(parts_of(group, memory.region(group, "parameter"), (start, stop)), start)
        update, is_bounded = scalars.entry.update, "max_grad_value" in scalars.hyperparameters
        if seed is None:  # operators that are called one by one take even lengths, which torch divides among threads
            is_kernel = isinstance(update, Fused) and update.is_kernel
            places = joined(places) if is_kernel else [Place(0, stop - start)]
        rounds_once = isinstance(update, Fused) and update.rounds_once and not is_bounded
        if divides_exactly(group.dtype) or (rounds_once and seed is None and MASTER not in states):
            scales = self._scales_gradients
            return slice_update(parameter, gradient, states, scalars, divisor=divisor, scales=scales, places=places)
        return narrow_update(parameter, gradient, states, scalars, self._scratch, seed, places)

    def change(self, index: int, hyperparameters: Hyperparameters) -> None:
        scalars = self._scalars[index]
        scalars.change({**scalars.hyperparameters, **hyperparameters})

    def cycle(self, momentum: float) -> None:
        """Set beta1 of each optimizer that has one."""
        for index, scalars in enumerate(self._scalars):
            if "beta1" in scalars.hyperparameters:
                self.change(index, {"beta1": momentum})

    def first(self, name: str) -> float:
        return float(self._scalars[0].hyperparameters[name])
