"""`hyperparam_dict`: hyperparameters of all optimizers, and dropout rates, from one step on."""

import difflib
import math
from collections.abc import Mapping
from numbers import Real

from torch import Tensor

from sambasim.errors import OptionError
from sambasim.samba.checks.findings import Finding, reporter
from sambasim.samba.checks.keywords import OTHER_WORDS, nearest
from sambasim.samba.checks.place import app_line
from sambasim.samba.dropout import ALL, rate_names, with_rates
from sambasim.samba.machine import Machine


class Hyperparameters:
    """What a loaded PEF takes from `hyperparam_dict`, and what it was told last."""

    def __init__(self, machine: Machine) -> None:
        program = machine.program
        self._machine = machine
        self._arguments = {argument.name for argument in program.runtime_arguments}
        self._of_optimizers = {name.partition("__")[2] for name in self._arguments if "__" in name}
        self.rates = () if program.training is None else rate_names(program.training)
        """The names of the dropout rates of the training step."""
        self.told: dict[str, float] = {}
        """What the optimizers were told so far."""
        self._told_rates: dict[str, float] = {}
        self._rates_changed = False
        self._last: Mapping[str, object] = {}

    def take(self, given: Mapping[str, object]) -> None:
        """`given` holds from now on; dropout rates from the next forward on. Names that nothing here takes are left
        out, with a notice.

        Raises OptionError for a value that is no number of 0 or more, for a dropout rate of 1 or more, for a name that
        is nearly a known one, and for a momentum where the PEF has no memory for one.
        """
        if given == self._last:
            return
        if not isinstance(given, Mapping):
            raise OptionError(
                f"AP04: hyperparam_dict is of type {type(given).__name__}",
                where=app_line(),
                remedy='hyperparam_dict={"lr": 0.1}',
            )
        if self._machine.program.training is None:
            what = "session.run is given hyperparameters, and this PEF predicts: nothing is trained"
            remedy = "compile and run without --inference, and give trace_graph the optimizers"
            reporter.report(Finding("AP07", what, app_line(), remedy))
            return
        numbers = {name: _number(name, value) for name, value in self._known(given).items()}
        self._take_rates({name: value for name, value in numbers.items() if name not in self._of_optimizers})
        self._take_for_optimizers({name: value for name, value in numbers.items() if name in self._of_optimizers})
        self._last = {**given} if not any(isinstance(value, Tensor) for value in given.values()) else {}

    def begin_forward(self) -> None:
        """Dropout rates that were taken since the last forward hold from now on."""
        training = self._machine.program.training
        if self._rates_changed and training is not None:
            self._machine.replica.run_graph(with_rates(training, self._told_rates))
            self._rates_changed = False

    def _known(self, given: Mapping[str, object]) -> Mapping[str, object]:
        known: dict[str, object] = {}
        takes = {*self._of_optimizers, *((ALL, *self.rates) if self.rates else ())}
        for name, value in given.items():
            if name in takes:
                known[name] = value
            elif name == "betas" and "beta1" in self._of_optimizers and isinstance(value, tuple | list):
                known |= dict(zip(("beta1", "beta2"), value, strict=False))
            elif difflib.get_close_matches(name, takes, n=1, cutoff=0.8):
                raise OptionError(
                    f"AP04: hyperparam_dict has {name}, which no optimizer of this PEF takes",
                    where=app_line(),
                    remedy=nearest(name, sorted(takes)),
                )
            else:
                instead = [OTHER_WORDS[name]] if OTHER_WORDS.get(name) in takes - given.keys() else _short(takes)
                what = f"hyperparam_dict has {name}, which no optimizer of this PEF takes: it is left out"
                remedy = f"names that it takes: {', '.join(instead)}"
                reporter.report(Finding("AP04", what, app_line(), remedy), notice_only=True)
        return known

    def _take_rates(self, rates: Mapping[str, float]) -> None:
        high = next((name for name, rate in rates.items() if rate >= 1), None)
        if high is not None:
            raise OptionError(
                f"AP04: {high} in hyperparam_dict is {rates[high]:g}, and a dropout rate is below 1",
                where=app_line(),
                remedy=f'hyperparam_dict={{"{high}": 0.1}}',
            )
        before = {} if ALL in rates else self._told_rates  # the rate for all takes the place of single ones
        now = {**before, **rates}
        if now != self._told_rates:
            self._told_rates, self._rates_changed = now, True

    def _take_for_optimizers(self, numbers: Mapping[str, float]) -> None:
        changed = {name: value for name, value in numbers.items() if self.told.get(name) != value}
        for index, optimizer in enumerate(self._machine.program.optimizers):
            taken = {name: value for name, value in changed.items() if f"{optimizer.name}__{name}" in self._arguments}
            if taken.get("momentum") and not optimizer.states:
                raise OptionError(
                    "momentum cannot be turned on: the PEF was compiled without it",
                    where=app_line(),
                    remedy="compile with momentum above 0",
                )
            if taken:
                self._machine.replica.change(index, taken)
        if changed:
            self.told = {**self.told, **changed}


def _short(names: set[str]) -> list[str]:
    """Names that fit into a line: without the rates of single dropouts."""
    return sorted(name for name in names if "__" not in name)


def _number(name: str, value: object) -> float:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    if isinstance(number, Real) and math.isfinite(float(number)) and float(number) >= 0:
        return float(number)
    remedy = f"give {name} as one number, 0 or more"
    if isinstance(number, list | tuple) and len(number) == 1:
        remedy = f'hyperparam_dict={{"{name}": …[0]}}: one number, and no {type(number).__name__}'
    shown = repr(number) if isinstance(number, Real | str | list | tuple) else f"a {type(number).__name__}"
    raise OptionError(f"AP04: {name} in hyperparam_dict is {shown}", where=app_line(), remedy=remedy)
