"""AP05 of hyperparameters: the device has those of the optimizers in `trace_graph`, and then those of `session.run`."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from sambasim.commands.torch_optimizers import plain_number
from sambasim.samba.device import Machine

_OPTIONS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "betas", "eps", "max_grad_norm")
ON_DEVICE = "on_device"
"""The key of a parameter group in a checkpoint: hyperparameters of the device that the options do not have."""
_LATE_STEPS = 3
"""An app may pass the value of an earlier step to the device, up to so many steps late."""

Group: TypeAlias = Mapping[str, object]
"""The values of `_OPTIONS` in one parameter group, with beta1 and beta2, their names on the device, for `betas`."""


@dataclass(slots=True)
class _Passed:
    """A hyperparameter that `session.run` got, its values in the groups of the host at that time, and for how many
    steps the host has had others since."""

    value: float
    on_host: Sequence[object]
    steps_apart: int = 0


class HostOptions:
    """The options of the app's optimizers since `trace_graph`, from which the device has its hyperparameters."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._at_trace = self._groups()
        self._agreed: object = None  # options of the host and hyperparameters given, in a step without difference
        self._passed: dict[str, _Passed] = {}

    def compare(self, given: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
        """An optimizer step is about to run with the hyperparameters `given`. Yields each hyperparameter that differs,
        how, and the remedy."""
        now = self._groups()
        if (now, given) == self._agreed:
            return
        for name, value in given.items():
            yield from self._compare_groups(name, value, [group.get(name) for group in now])
        for at_trace, group in zip(self._at_trace, now, strict=False):
            for name, after in group.items():
                before, on_device = at_trace[name], given.get(name, at_trace[name])
                is_late = name in given and self._passed[name].steps_apart < _LATE_STEPS
                if not is_late and not _is_same(on_device, after):
                    first = _shown(on_device if _is_same(before, after) else before)
                    change = f"the app has changed {name} of an optimizer from {first} to {_shown(after)}"
                    what = f"{change}, and the device continues with {_shown(on_device)}"
                    yield name, what, self._remedy(name, now)
        # While the host differs, each step counts.
        self._agreed = None if any(passed.steps_apart for passed in self._passed.values()) else (now, given)

    def for_checkpoint(self, given: Mapping[str, float]) -> dict[str, tuple[list[object], float]]:
        """What the device has from `given`, with the options of the host, where those are still of `trace_graph`."""
        hosts = {name: self._of_groups(name) for name in given}
        at_trace = {name: [group.get(name) for group in self._at_trace] for name in given}
        return {name: (hosts[name], value) for name, value in given.items() if hosts[name] == at_trace[name]}

    def taken_from_checkpoint(self) -> dict[str, float]:
        """What `for_checkpoint` has kept in a checkpoint that the app has loaded, once, where the app has not changed
        its options since."""
        groups = (group for optimizer in self._machine.optimizers for group in optimizer.param_groups)
        kept = {name: each for group in groups for name, each in group.pop(ON_DEVICE, {}).items()}
        return {name: value for name, (hosts, value) in kept.items() if self._of_groups(name) == hosts}

    def _of_groups(self, name: str) -> list[object]:
        return [group.get(name) for group in self._groups()]

    def _groups(self) -> list[Group]:
        groups = (group for optimizer in self._machine.optimizers for group in optimizer.param_groups)
        return [_named(plain_number(group.get(name)) for name in _OPTIONS) for group in groups]

    def _compare_groups(self, name: str, value: float, on_host: Sequence[object]) -> Iterator[tuple[str, str, str]]:
        """Counts for how many steps the host has had other values than when `session.run` got a new `value`."""
        passed = self._passed.get(name)
        if passed is None or passed.value != value:
            self._passed[name] = _Passed(value, on_host)
        else:
            passed.steps_apart = 0 if on_host == passed.on_host else passed.steps_apart + 1
        values = [number for number in on_host if number is not None]  # not every optimizer has it
        if not all(_is_same(number, values[0]) for number in values):
            shown = ", ".join(dict.fromkeys(map(_shown, values)))
            what = f"parameter groups differ in {name}: {shown}; and session.run sets {value:g} for all of them"
            yield name, what, f"leave {name} out of hyperparam_dict, and change it before trace_graph"

    def _remedy(self, name: str, now: Sequence[Group]) -> str:
        """How to send hyperparameter `name` to the device."""
        values = [group.get(name) for group in now]
        taken = {argument.name.partition("__")[2] for argument in self._machine.program.runtime_arguments}
        if name not in taken or None in values:
            return "set it where the optimizer is made, and compile the app again: the PEF has no other"
        if any(value != values[0] for value in values):
            return f"change {name} before trace_graph: hyperparam_dict sets one value for all parameter groups"
        if name == "lr":
            return 'session.run(…, hyperparam_dict={"lr": scheduler.get_last_lr()[0]})'
        return f'session.run(…, hyperparam_dict={{"{name}": …}}), or change it before trace_graph'


def _named(values: Iterable[object]) -> Group:
    named = dict(zip(_OPTIONS, values, strict=True))
    match named.pop("betas"):
        case (beta1, beta2):
            return {**named, "beta1": beta1, "beta2": beta2}
    return {**named, "beta1": None, "beta2": None}


def _is_same(before: object, after: object) -> bool:
    if isinstance(before, int | float) and isinstance(after, int | float):
        return math.isclose(before, after, rel_tol=1e-6)  # a learning rate may be a tensor of float32
    return before == after


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
