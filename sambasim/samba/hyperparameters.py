"""`hyperparam_dict`: hyperparameters of all optimizers, from one step on."""

import math
from collections.abc import Mapping

from torch import Tensor

from sambasim.errors import OptionError
from sambasim.samba.checks.keywords import nearest
from sambasim.samba.checks.place import app_line
from sambasim.samba.machine import Machine


def change(machine: Machine, hyperparameters: Mapping[str, float]) -> None:
    """Each optimizer of the device takes those that it has. Raises OptionError for one that none has, and for a
    momentum where the PEF has no place for one."""
    names = {argument.name for argument in machine.program.runtime_arguments}
    known = {name.partition("__")[2] for name in names if "__" in name}
    unknown = sorted(set(hyperparameters) - known)
    if unknown:
        raise OptionError(
            f"AP04: hyperparam_dict has {unknown[0]}, which no optimizer of this PEF takes",
            where=app_line(),
            remedy=nearest(unknown[0], sorted(known)),
        )
    of_each = [
        {name: value for name, value in hyperparameters.items() if f"{optimizer.name}__{name}" in names}
        for optimizer in machine.program.optimizers
    ]
    for optimizer, taken in zip(machine.program.optimizers, of_each, strict=True):
        if taken.get("momentum") and not optimizer.states:
            raise OptionError(
                "momentum cannot be turned on: the PEF was compiled without it",
                remedy="compile with momentum above 0",
            )
    for index, taken in enumerate(of_each):
        machine.replica.change(index, taken)


def numbers_of(given: Mapping[str, object]) -> dict[str, float]:
    """What `hyperparam_dict` says now: a tensor in it may hold another number later. Raises OptionError for a value
    that is no number of 0 or more."""
    return {name: _number(name, value) for name, value in given.items()}


def _number(name: str, value: object) -> float:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, int | float) and math.isfinite(number) and number >= 0:
        return float(number)
    remedy = f"give {name} as one number, 0 or more"
    if isinstance(number, list | tuple) and len(number) == 1:
        remedy = f'hyperparam_dict={{"{name}": …[0]}}: one number, and no {type(number).__name__}'
    shown = repr(number) if isinstance(number, int | float | str | list | tuple) else f"a {type(number).__name__}"
    raise OptionError(f"AP04: {name} in hyperparam_dict is {shown}", where=app_line(), remedy=remedy)
