"""OPT: one optimizer step on slices of groups, from the table `sambasim.optimizers`, and its runtime arguments.

Updates run on any slice of a group whose ends are multiples of 64 elements, with the bits of an update of the whole
group. Views, lists and the choice of the kernel are prepared once. 16-bit parameters are updated in float32: see
`wide_update`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from sambasim.errors import InternalError
from sambasim.ir.program import ROUNDING_SEED, ParameterGroup, Program
from sambasim.optimizers import OPTIMIZERS, Fused, Written
from sambasim.options.training import OptimizerOptions
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.wide_update import WideUpdates

Arguments: TypeAlias = Mapping[str, float | int | bool]


def bind_arguments(program: Program, optimizer: OptimizerOptions, world_size: int, rank: int, seed: int) -> Arguments:
    """A value for every runtime argument: from this run, else the program's default.

    Raises InternalError for a hyperparameter that the program does not take.
    """
    bound: dict[str, float | int | bool] = {argument.name: argument.default for argument in program.runtime_arguments}
    given: dict[str, float | int | bool] = {
        f"{one.name}__{name}": value
        for one in program.optimizers
        for name, value in optimizer.hyperparameters().items()
    }
    if program.data_parallel is not None:
        given |= {"dp_scale_factor": world_size, "dp_replica": rank}
    if ROUNDING_SEED in bound:
        given[ROUNDING_SEED] = seed
    unknown = sorted(set(given) - set(bound))
    if unknown:
        raise InternalError(f"the program takes no runtime argument {unknown[0]}")
    return {**bound, **given}


def of_optimizer(arguments: Arguments, optimizer: str) -> dict[str, float | int | bool]:
    """The hyperparameters of one optimizer, without the prefix."""
    prefix = f"{optimizer}__"
    return {name.removeprefix(prefix): value for name, value in arguments.items() if name.startswith(prefix)}


Hyperparameters: TypeAlias = Mapping[str, float | bool]
SliceUpdate: TypeAlias = Callable[[Tensor], None]
"""Updates one slice of a group's parameters and states in place, given the mean gradient of that slice."""


class Scalars:
    """The scalar arguments of one optimizer's updates: hyperparameters, learning rate and step number."""

    def __init__(self, kind: str, hyperparameters: Hyperparameters) -> None:
        self.entry = OPTIMIZERS[kind]
        self.counts = isinstance(self.entry.update, Fused) and "step" in self.entry.update.operands
        self.hyperparameters = hyperparameters
        self.step = 0
        self.number = torch.zeros(())
        self.keywords: dict[str, float | bool] = {}
        self._last_given: tuple[Hyperparameters, float, bool] | None = None

    def begin(self, step: int, rate: float) -> None:
        """Begin step `step` (from 1); `rate` multiplies the learning rate."""
        given, before, is_first = self.hyperparameters, self._last_given, step == 1
        self.step = step
        if self.counts:
            self.number.fill_(step)
        if before is not None and before[0] is given and before[1:] == (rate, is_first):
            return
        self._last_given = (given, rate, is_first)
        now = {**given, "lr": float(given["lr"]) * rate}
        update = self.entry.update
        self.keywords.clear()
        self.keywords.update(update.keywords(now, is_first) if isinstance(update, Fused) else now)


def divides_exactly(dtype: str) -> bool:
    """Whether an update that divides its gradient has the same bits as a division before it: for narrow dtypes, kernels
    would not round the quotient."""
    return dtype in ("float32", "float64")


def slice_update(parameter: Tensor, states: Mapping[str, Tensor], scalars: Scalars, divisor: int = 1) -> SliceUpdate:
    """A function that updates `parameter` and `states`, flat and of one length, with the current values of `scalars`.

    It divides the gradient by `divisor`, in place.
    """
    if parameter.numel() == 0:
        return lambda gradient: None
    update, keywords = scalars.entry.update, scalars.keywords
    if not isinstance(update, Fused):
        return partial(_write, update, parameter, states, keywords, divisor)
    scale = None if divisor == 1 else torch.tensor(float(divisor))
    kernel: Callable[..., object] = partial(getattr(torch, update.kernel), grad_scale=scale)
    tensors = {**states, "step": scalars.number}
    parameters, operands = [parameter], [[tensors[name]] if name in tensors else [] for name in update.operands]
    needs, none = scalars.entry.needs, [list[Tensor]() for _ in operands]

    def fused(gradient: Tensor) -> None:
        kernel(parameters, [gradient], *operands, **keywords)

    def fused_if_needed(gradient: Tensor) -> None:
        # A state that the kernel does not read is not passed: the kernel would still write it.
        given = operands if keywords[needs or ""] else none
        kernel(parameters, [gradient], *given, **keywords)

    return fused if needs is None else fused_if_needed


def _write(
    update: Written,
    parameter: Tensor,
    states: Mapping[str, Tensor],
    keywords: Mapping[str, float | bool],
    divisor: int,
    gradient: Tensor,
) -> None:
    if divisor != 1:
        gradient.div_(divisor)
    update(parameter, gradient, states, keywords)


class Optimizers:
    """OPT of all groups of `program`, on the parameters and states in `memory`."""

    def __init__(self, program: Program, memory: DeviceMemory, arguments: Arguments) -> None:
        self._program = program
        self._memory = memory
        self._scalars = [Scalars(one.kind, of_optimizer(arguments, one.name)) for one in program.optimizers]
        self._number_of = {group.name: number for number, group in enumerate(program.groups)}
        seed = arguments.get(ROUNDING_SEED)
        self._wide = WideUpdates(None if seed is None else int(seed))

    def begin(self, step: int, rate: float) -> None:
        """Begin step `step` (from 1); `rate` multiplies the learning rates."""
        for scalars in self._scalars:
            scalars.begin(step, rate)

    def slice(self, group: ParameterGroup, start: int, stop: int, divisor: int = 1) -> SliceUpdate:
        """A function that updates elements `start` to `stop` of `group`, both multiples of 64, in every step.

        It divides the gradient by `divisor`, in place. Raises InternalError for another than 1 where the type of the
        group is not one that `divides_exactly`.
        """
        memory, scalars = self._memory, self._scalars[group.optimizer]
        parameter = memory.region(group, "parameter")[start:stop]
        states = {
            state: memory.region(group, state)[start:stop] for state in self._program.optimizers[group.optimizer].states
        }
        if divides_exactly(group.dtype):
            return slice_update(parameter, states, scalars, divisor)
        if divisor != 1:
            raise InternalError(f"an update of {group.dtype} does not divide its gradient")
        update = partial(slice_update, scalars=scalars)
        return self._wide.slice(self._number_of[group.name], start, parameter, states, lambda: scalars.step, update)

    def change(self, index: int, hyperparameters: Hyperparameters) -> None:
        """Set hyperparameters of optimizer number `index`, by name, from the next step on."""
        scalars = self._scalars[index]
        scalars.hyperparameters = {**scalars.hyperparameters, **hyperparameters}

    def first(self, name: str) -> float:
        """A hyperparameter of the first optimizer."""
        return float(self._scalars[0].hyperparameters[name])
