"""AP05 for hyperparameters: the options of the app's optimizers, compared with what the device trains with."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sambasim.commands.torch_optimizers import plain_number
from sambasim.samba.device import Machine

_OPTIONS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "betas", "eps", "max_grad_norm")
_FLOAT32_PRECISION = 1e-6
"""A learning rate may be a tensor of float32."""

_LATE_STEPS = 3
"""An app may pass the value of an earlier step to the device, up to so many steps late."""

_SET_AND_COMPILE = "set it where the optimizer is made, and compile the app again: the PEF has no other"

Groups: TypeAlias = Sequence[Sequence[object]]
"""The values of `_OPTIONS` in each parameter group."""


@dataclass(slots=True)
class _Passed:
    """A hyperparameter that `session.run` got, the options of the host at that time, and for how many steps the host
    has had another value of it since."""

    value: float
    on_host: Groups
    steps_apart: int = 0


class HostOptions:
    """The options of the app's optimizers since `trace_graph`, from which the device has its hyperparameters."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._at_trace = [list(map(plain_number, values)) for values in self._options()]
        self._agreed: object = None  # options of the host and hyperparameters given, in a step without difference
        self._passed: dict[str, _Passed] = {}

    def compare(self, given: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
        """An optimizer step is about to run with the hyperparameters `given`. Yields each hyperparameter that differs,
        how, and the remedy."""
        options = self._options()
        if (options, given) == self._agreed:
            return
        now = [list(map(plain_number, values)) for values in options]
        self._follow(now, given)
        yield from self._compare_groups(now, given)
        yield from self._compare_hyperparameters(now, given)
        # While the host differs, each step counts.
        self._agreed = None if any(passed.steps_apart for passed in self._passed.values()) else (now, given)

    def _options(self) -> list[list[object]]:
        return [
            list(map(group.get, _OPTIONS)) for optimizer in self._machine.optimizers for group in optimizer.param_groups
        ]

    def _follow(self, now: Groups, given: Mapping[str, float]) -> None:
        """Count for how many steps the host has another value than when `session.run` got a new one."""
        for name, value in given.items():
            passed = self._passed.get(name)
            if passed is None or passed.value != value:
                self._passed[name] = _Passed(value, now)
            elif _of_each(now, name) == _of_each(passed.on_host, name):
                passed.steps_apart = 0
            else:
                passed.steps_apart += 1

    def _compare_groups(self, now: Groups, given: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
        """`session.run` sets one value for all parameter groups."""
        for name, value in given.items():
            values = [number for number in _of_each(now, name) if number is not None]  # not every optimizer has it
            if not all(_is_same(number, values[0]) for number in values):
                on_host = ", ".join(dict.fromkeys(map(_shown, values)))
                what = f"parameter groups differ in {name}: {on_host}; and session.run sets {value:g} for all of them"
                yield name, what, f"leave {name} out of hyperparam_dict, and change it before trace_graph"

    def _compare_hyperparameters(self, now: Groups, given: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
        for at_trace, group in zip(self._at_trace, now, strict=False):
            for (name, before), (_, after) in zip(_named(at_trace), _named(group), strict=True):
                on_device = given.get(name, before)
                is_late = name in given and self._passed[name].steps_apart < _LATE_STEPS
                if is_late or _is_same(on_device, after):
                    continue
                first = on_device if _is_same(before, after) else before
                what = (
                    f"the app has changed {name} of an optimizer from {_shown(first)} to {_shown(after)}, and the "
                    f"device continues with {_shown(on_device)}"
                )
                yield name, what, self._remedy(name, now)

    def _remedy(self, name: str, now: Groups) -> str:
        """How to send hyperparameter `name` to the device; `now` holds the options of each parameter group."""
        values = _of_each(now, name)
        optimizers = self._machine.program.optimizers
        arguments = {argument.name for argument in self._machine.program.runtime_arguments}
        is_taken = any(f"{optimizer.name}__{name}" in arguments for optimizer in optimizers)
        stateless = name == "momentum" and not all(optimizer.states for optimizer in optimizers)
        if not is_taken or stateless or None in values:
            return _SET_AND_COMPILE
        if any(value != values[0] for value in values):
            return f"change {name} before trace_graph: hyperparam_dict sets one value for all parameter groups"
        if name == "lr":
            return 'session.run(…, hyperparam_dict={"lr": scheduler.get_last_lr()[0]})'
        return f'session.run(…, hyperparam_dict={{"{name}": …}}), or change it before trace_graph'


def _named(values: Sequence[object]) -> Iterator[tuple[str, object]]:
    """Pairs of name and value; `betas` as beta1 and beta2, which are their names on the device."""
    for name, value in zip(_OPTIONS, values, strict=True):
        if name == "betas":
            yield from zip(("beta1", "beta2"), value if isinstance(value, tuple | list) else (None, None), strict=True)
        else:
            yield name, value


def _of_each(groups: Groups, name: str) -> list[object]:
    """The value of hyperparameter `name` in each parameter group."""
    return [dict(_named(values)).get(name) for values in groups]


def _is_same(before: object, after: object) -> bool:
    if isinstance(before, int | float) and isinstance(after, int | float):
        return math.isclose(before, after, rel_tol=_FLOAT32_PRECISION)
    return before == after


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
