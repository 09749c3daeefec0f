"""OPT: one optimizer step on slices of groups, by torch's fused kernels.

The kernels run on any slice of a group that starts and ends at a multiple of 64 elements, with the bits of a run on the
whole group. What does not change from step to step (views, lists, which kernel) is put together once. What is stored in
16 bits is updated in float32: see `wide_update`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from sambasim.errors import InternalError
from sambasim.ir.program import ROUNDING_SEED, ParameterGroup, Program
from sambasim.runtime.arguments import Arguments, of_optimizer
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.wide_update import WideUpdates

Hyperparameters: TypeAlias = Mapping[str, float | bool]
SliceUpdate: TypeAlias = Callable[[Tensor], None]
"""Updates one slice of a group's parameters and states in place, given the mean gradient of that slice."""


KERNELS: Mapping[str, Callable[..., object]] = {
    "sgd": torch._fused_sgd_,
    "adam": torch._fused_adam_,
    "adamw": torch._fused_adamw_,
}


class Scalars:
    """What one optimizer's kernels are given beside tensors: hyperparameters, learning rate and step number."""

    def __init__(self, kind: str, hyperparameters: Hyperparameters) -> None:
        self.kind = kind
        self.hyperparameters = hyperparameters
        self.step = 0
        self.number = torch.zeros(())
        self.keywords: dict[str, float | bool] = {}
        self._begun_with: tuple[Hyperparameters, float, bool] | None = None

    def begin(self, step: int, rate: float) -> None:
        """Step `step`, which counts from 1, begins; `rate` multiplies the learning rate."""
        given, before, is_first = self.hyperparameters, self._begun_with, step == 1
        self.step = step
        if self.kind != "sgd":
            self.number.fill_(step)
        if before is not None and before[0] is given and before[1:] == (rate, is_first):
            return
        self._begun_with = (given, rate, is_first)
        self.keywords.update(lr=float(given["lr"]) * rate, weight_decay=float(given["weight_decay"]), maximize=False)
        if self.kind == "sgd":
            self.keywords.update(
                momentum=float(given["momentum"]),
                dampening=float(given["dampening"]),
                nesterov=bool(given["nesterov"]),
                is_first_step=is_first,
            )
        else:
            self.keywords.update(
                beta1=float(given["beta1"]), beta2=float(given["beta2"]), eps=float(given["eps"]), amsgrad=False
            )


def divides_exactly(dtype: str) -> bool:
    """Whether an update that divides its gradient has the bits of a division before it: the kernels would not round the
    quotient to a narrow type."""
    return dtype in ("float32", "float64")


def slice_update(parameter: Tensor, states: Mapping[str, Tensor], scalars: Scalars, divisor: int = 1) -> SliceUpdate:
    """What updates `parameter` and `states`, which are flat and of one length, by the values of `scalars` at that time.

    It divides the gradient by `divisor`, in place. The arithmetic is that of torch.optim.SGD, Adam and AdamW with
    `fused=True`.
    """
    if parameter.numel() == 0:
        return lambda gradient: None
    parameters, keywords = [parameter], scalars.keywords
    kernel = partial(KERNELS[scalars.kind], grad_scale=None if divisor == 1 else torch.tensor(float(divisor)))
    if scalars.kind == "sgd":
        momenta = [states["momentum"]] if "momentum" in states else []

        def update_sgd(gradient: Tensor) -> None:
            # A buffer that a momentum of zero would leave unread is not handed in: the kernel would still write it.
            kernel(parameters, [gradient], momenta if keywords["momentum"] else [], **keywords)

        return update_sgd
    first, second, numbers = [states["exp_avg"]], [states["exp_avg_sq"]], [scalars.number]

    def update_adam(gradient: Tensor) -> None:
        kernel(parameters, [gradient], first, second, [], numbers, **keywords)

    return update_adam


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
        """Step `step`, which counts from 1, begins; `rate` multiplies the learning rates."""
        for scalars in self._scalars:
            scalars.begin(step, rate)

    def slice(self, group: ParameterGroup, start: int, stop: int, divisor: int = 1) -> SliceUpdate:
        """What updates elements `start` to `stop` of `group`, both multiples of 64; valid for every step.

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
        """Optimizer number `index` takes these hyperparameters, by name, from the next step on; others stay."""
        scalars = self._scalars[index]
        scalars.hyperparameters = {**scalars.hyperparameters, **hyperparameters}

    def first(self, name: str) -> float:
        """A hyperparameter of the first optimizer."""
        return float(self._scalars[0].hyperparameters[name])
