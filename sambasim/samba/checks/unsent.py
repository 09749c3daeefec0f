"""AP05: what the app changes on the host once the device has it, and does not send.

The device has its own weights, and its own hyperparameters: those that the optimizers had in `trace_graph`. A host that
takes optimizer steps of its own, to compare with the device, goes its own way, and its weights are not looked at.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.place import app_line
from sambasim.samba.checks.steps import is_looked_at
from sambasim.samba.checks.telling import telling
from sambasim.samba.machine import Machine

_OPTIONS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "betas", "eps", "max_grad_norm")
_NUMBERS_OF_A_TENSOR = 1e-6
"""A tensor of float32 holds a learning rate this nearly."""


@dataclass(frozen=True, slots=True)
class _Version:
    """Where a parameter lies, and how often it was written to there: if neither differs, no value does."""

    place: int
    writes: int


class Unsent:
    """What host and device had in common when they last exchanged it, for one loaded PEF."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._hyperparameters = self._hyperparameters_now()
        self._trained = {path: parameter.requires_grad for path, parameter in self._parameters()}
        self._weights: dict[str, _Version] = {}
        self._steps_at_exchange = 0
        self._runs = 0
        self._host_trains = False
        self._told: set[str] = set()
        for optimizer in machine.optimizers:
            optimizer.register_step_post_hook(lambda *_: self._note_host_step())

    def note_exchange(self) -> None:
        """Host and device have the same weights now."""
        self._weights = {path: _version(parameter) for path, parameter in self._parameters()}
        self._steps_at_exchange = self._machine.replica.steps
        self._host_trains = False

    def note_run(self, given: Collection[str], *, thoroughly: bool) -> None:
        """Sections are about to run. `given` are the hyperparameters that `session.run` was ever told.

        thoroughly: whether weights are looked at in every run, and not in a few
        """
        self._runs += 1
        now = self._hyperparameters_now()
        if now != self._hyperparameters:
            self._compare_hyperparameters(now, given)
        if thoroughly or is_looked_at(self._runs):
            self._compare_trained()
            self._compare_weights()

    def _compare_hyperparameters(self, now: list[list[object]], given: Collection[str]) -> None:
        for of_one, of_one_now in zip(self._hyperparameters, now, strict=False):
            for (name, before), (_, after) in zip(_named(of_one), _named(of_one_now), strict=True):
                if name not in given and not _is_same(before, after):
                    self._tell(
                        name,
                        f"the app has changed {name} of an optimizer from {_told(before)} to {_told(after)}, and the "
                        f"device goes on with {_told(before)}",
                        _remedy(name),
                    )

    def _compare_trained(self) -> None:
        now = {path: parameter.requires_grad for path, parameter in self._parameters()}
        changed = [path for path, trains in now.items() if self._trained.get(path, trains) != trains]
        if changed:
            first, more = changed[0], f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            self._tell(
                "requires_grad",
                f"requires_grad of {first}{more} is {now[first]} now, and on the device still {not now[first]}",
                "set it where the model is made, and compile the app again: what is trained is part of a PEF",
            )

    def _compare_weights(self) -> None:
        if self._host_trains:
            return
        for path, parameter in self._parameters():
            if path in self._weights and _version(parameter) != self._weights[path] and self._differs(path, parameter):
                self._tell(
                    "weights",
                    f"the app has changed weights of the model, {path} first, and the device goes on with its own",
                    "samba.session.to_device(model), or load weights before trace_graph",
                )
                return

    def _differs(self, path: str, parameter: nn.Parameter) -> bool:
        """Whether a parameter that was written to, or moved, has other values too, as far as that can be known: once
        the device has taken a step, nobody has the old ones."""
        symbols = (symbol for symbol in self._machine.program.symbols.values() if path in symbol.torch_names)
        symbol = next(symbols, None)
        if symbol is None:
            return False
        if self._machine.replica.steps != self._steps_at_exchange:
            return True
        on_device = self._machine.replica.read(symbol.name)
        return not torch.equal(parameter.detach().to(on_device.dtype), on_device)

    def _note_host_step(self) -> None:
        self._host_trains = True

    def _tell(self, subject: str, what: str, remedy: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            telling.tell(Finding("AP05", what, app_line(), remedy))

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._machine.model.named_parameters(remove_duplicate=False)

    def _hyperparameters_now(self) -> list[list[object]]:
        return [_values(group) for optimizer in self._machine.optimizers for group in optimizer.param_groups]


def _version(parameter: nn.Parameter) -> _Version:
    # What was made in inference mode counts no writes.
    return _Version(parameter.data_ptr(), -1 if parameter.is_inference() else parameter._version)


def _values(group: Mapping[str, Any]) -> list[object]:
    """Of a parameter group. Torch also takes a tensor of one element, which a scheduler changes in place."""
    return [value.item() if isinstance(value, Tensor) else value for value in map(group.get, _OPTIONS)]


def _named(values: list[object]) -> Iterator[tuple[str, object]]:
    """By the names that the device has for them."""
    for name, value in zip(_OPTIONS, values, strict=True):
        if name == "betas":
            beta1, beta2 = value if isinstance(value, tuple | list) else (None, None)
            yield from (("beta1", beta1), ("beta2", beta2))
        else:
            yield name, value


def _is_same(before: object, after: object) -> bool:
    if isinstance(before, int | float) and isinstance(after, int | float):
        return math.isclose(before, after, rel_tol=_NUMBERS_OF_A_TENSOR)
    return before == after


def _told(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _remedy(name: str) -> str:
    if name == "lr":
        return 'session.run(…, hyperparam_dict={"lr": scheduler.get_last_lr()[0]})'
    return f'session.run(…, hyperparam_dict={{"{name}": …}}), or change it before trace_graph'
