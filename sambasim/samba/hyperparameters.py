"""`hyperparam_dict`: hyperparameters of all optimizers, and dropout rates, from one step on."""

import math
from collections.abc import Mapping

from torch import Tensor

from sambasim.errors import OptionError
from sambasim.samba.checks.place import app_line
from sambasim.samba.dropout import ALL, rate_names, with_rates
from sambasim.samba.machine import Machine
from sambasim.samba.notices import say_once


class Hyperparameters:
    """What a loaded PEF takes from `hyperparam_dict`, and what it was told last."""

    def __init__(self, machine: Machine) -> None:
        program = machine.program
        self._machine = machine
        self._arguments = {argument.name for argument in program.runtime_arguments}
        self._of_optimizers = {name.partition("__")[2] for name in self._arguments if "__" in name}
        names = () if program.training is None else rate_names(program.training)
        self._rates = (ALL, *names) if names else ()
        self._told: dict[str, float] = {}

    @property
    def told(self) -> Mapping[str, float]:
        """All that the optimizers were told so far."""
        return {name: value for name, value in self._told.items() if name in self._of_optimizers}

    @property
    def rates(self) -> tuple[str, ...]:
        """The names of the dropout rates of the training step."""
        return self._rates[1:]

    def take(self, given: Mapping[str, object]) -> None:
        """`given` holds from now on. Names that nothing here takes are left out, with a notice.

        Raises OptionError for a value that is no number of 0 or more, for a dropout rate of 1 or more, and for a
        momentum where the PEF has no memory for one.
        """
        numbers = {name: _number(name, value) for name, value in self._known(given).items()}
        changed = {name: value for name, value in numbers.items() if self._told.get(name) != value}
        if not changed:
            return
        rates = {name: value for name, value in changed.items() if name in self._rates}
        if rates:
            self._change_rates({name: value for name, value in {**self._told, **rates}.items() if name in self._rates})
        self._change_optimizers({name: value for name, value in changed.items() if name in self._of_optimizers})
        self._told |= changed

    def _known(self, given: Mapping[str, object]) -> Mapping[str, object]:
        known: dict[str, object] = {}
        for name, value in given.items():
            if name in self._of_optimizers or name in self._rates:
                known[name] = value
            elif name == "betas" and "beta1" in self._of_optimizers and isinstance(value, tuple | list):
                known |= dict(zip(("beta1", "beta2"), value, strict=False))
            else:
                takes = ", ".join(sorted({*self._of_optimizers, *self._rates}))
                say_once(f"{name!r} in hyperparam_dict", f"this PEF takes {takes}", app_line())
        return known

    def _change_rates(self, rates: Mapping[str, float]) -> None:
        high = next((name for name, rate in rates.items() if rate >= 1), None)
        if high is not None:
            raise OptionError(
                f"AP04: {high} in hyperparam_dict is {rates[high]:g}, and a dropout rate is below 1",
                where=app_line(),
                remedy=f'hyperparam_dict={{"{high}": 0.1}}',
            )
        if self._machine.program.training is not None:
            self._machine.replica.run_graph(with_rates(self._machine.program.training, rates))

    def _change_optimizers(self, numbers: Mapping[str, float]) -> None:
        for index, optimizer in enumerate(self._machine.program.optimizers):
            taken = {name: value for name, value in numbers.items() if f"{optimizer.name}__{name}" in self._arguments}
            if taken.get("momentum") and not optimizer.states:
                raise OptionError(
                    "momentum cannot be turned on: the PEF was compiled without it",
                    where=app_line(),
                    remedy="compile with momentum above 0",
                )
            self._machine.replica.change(index, taken)


def _number(name: str, value: object) -> float:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, int | float) and math.isfinite(number) and number >= 0:
        return float(number)
    remedy = f"give {name} as one number, 0 or more"
    if isinstance(number, list | tuple) and len(number) == 1:
        remedy = f'hyperparam_dict={{"{name}": …[0]}}: one number, and no {type(number).__name__}'
    shown = repr(number) if isinstance(number, int | float | str | list | tuple) else f"a {type(number).__name__}"
    raise OptionError(f"AP04: {name} in hyperparam_dict is {shown}", where=app_line(), remedy=remedy)
