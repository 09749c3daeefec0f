"""AP05: what the app changes on the host once the device has it, and does not send.

The device has its own weights, and its own hyperparameters: those that the optimizers had in `trace_graph`.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.place import app_line
from sambasim.samba.checks.telling import telling
from sambasim.samba.machine import Machine

_HYPERPARAMETERS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "beta1", "beta2", "eps", "max_grad_norm")


class Unsent:
    """What host and device had in common when they last exchanged it, for one loaded PEF."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._hyperparameters = self._hyperparameters_now()
        self._weights: Mapping[str, tuple[int, int]] = {}
        trained = {member.parameter for group in machine.program.groups for member in group.members}
        self._trained = {path for name in trained for path in machine.program.symbols[name].torch_names}
        self._told: set[str] = set()

    def note_exchange(self) -> None:
        """Host and device have the same weights now."""
        self._weights = self._weights_now()

    def note_step(self, given: Collection[str], *, thoroughly: bool) -> None:
        """An optimizer step is about to begin. `given` are the hyperparameters that `session.run` was ever told.

        thoroughly: whether weights are looked at too, which takes longer the more of them there are
        """
        now = self._hyperparameters_now()
        if now != self._hyperparameters:
            self._compare_hyperparameters(now, given)
        if thoroughly and self._weights:
            self._compare_weights()

    def _compare_hyperparameters(self, now: list[dict[str, object]], given: Collection[str]) -> None:
        for of_one, of_one_now in zip(self._hyperparameters, now, strict=False):
            for name, before in of_one.items():
                after = of_one_now[name]
                if before != after and name not in given:
                    self._tell(
                        name,
                        f"the app has changed {name} of an optimizer from {_told(before)} to {_told(after)}, and the "
                        f"device goes on with {_told(before)}",
                        _remedy(name),
                    )

    def _compare_weights(self) -> None:
        parameters = dict(self._machine.model.named_parameters(remove_duplicate=False))
        for path, parameter in parameters.items():
            if path in self._weights and parameter.requires_grad != (path in self._trained):
                does = "trains it" if path in self._trained else "does not train it"
                self._tell(
                    "requires_grad",
                    f"{path} has requires_grad={parameter.requires_grad} now, and the device {does}, as compiled",
                    "set requires_grad before samba.session.compile; each choice of what is trained has its own PEF",
                )
        # A host that trains, too, to compare with the device, has gradients.
        if any(parameter.grad is not None for parameter in parameters.values()):
            return
        now = self._weights_now()
        changed = [path for path, before in self._weights.items() if now.get(path) != before]
        if changed:
            self._tell(
                "weights",
                f"the app has changed weights of the model, {changed[0]} first, and the device goes on with its own",
                "samba.session.to_device(model), or load weights before trace_graph",
            )

    def _tell(self, subject: str, what: str, remedy: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            telling.tell(Finding("AP05", what, app_line(), remedy))

    def _hyperparameters_now(self) -> list[dict[str, object]]:
        groups = [group for optimizer in self._machine.optimizers for group in optimizer.param_groups]
        return [_numbers(group) for group in groups]

    def _weights_now(self) -> Mapping[str, tuple[int, int]]:
        """By path: where a parameter lies, and how often it was written to there."""
        named = self._machine.model.named_parameters(remove_duplicate=False)
        return {path: (parameter.data_ptr(), parameter._version) for path, parameter in named}


def _numbers(group: Mapping[str, Any]) -> dict[str, object]:
    """Of a parameter group. Torch also takes a tensor of one element, which a scheduler changes in place."""
    beta1, beta2 = group.get("betas", (None, None))
    given = {**group, "beta1": beta1, "beta2": beta2}
    return {name: value.item() if isinstance(value := given.get(name), Tensor) else value for name in _HYPERPARAMETERS}


def _told(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _remedy(name: str) -> str:
    if name == "lr":
        return 'session.run(…, hyperparam_dict={"lr": scheduler.get_last_lr()[0]})'
    return f'session.run(…, hyperparam_dict={{"{name}": …}}), or change it before trace_graph'
