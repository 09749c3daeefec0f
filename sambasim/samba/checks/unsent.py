"""AP05: what the app changes on the host once the device has it, and does not send.

The device has its own weights, and its own hyperparameters: those that the optimizers had in `trace_graph`. A host that
takes optimizer steps of its own, to compare with the device, goes its own way, and its weights are not looked at.
"""

import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sambasim.ir.graph import SectionKind
from sambasim.runtime.digests import tensor_sha256
from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.place import app_line
from sambasim.samba.checks.steps import is_looked_at
from sambasim.samba.checks.telling import telling
from sambasim.samba.machine import Machine
from sambasim.samba.request import Optimizer

_OPTIONS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "betas", "eps", "max_grad_norm")
_NUMBERS_OF_A_TENSOR = 1e-6
"""A tensor of float32 holds a learning rate this nearly."""

_STEPS_LEFT_BEHIND = 3
"""For so many steps an app may tell the device the value of before: some are late by one."""


@dataclass(slots=True)
class _Followed:
    """A hyperparameter that `session.run` was told, what the host's groups of parameters had then, and for how many
    steps they have had another value of it since."""

    given: float
    on_host: Sequence[Sequence[object]]
    steps_apart: int = 0


class Unsent:
    """What host and device had in common when they last exchanged it, for one loaded PEF."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._hyperparameters = [list(map(_number, values)) for values in self._options()]
        self._agreed: object = None
        """All options, and what `session.run` was told, in a step in which host and device agreed."""
        self._trained = {path: parameter.requires_grad for path, parameter in self._parameters()}
        self._weights: Mapping[str, str] = {}
        self._runs = 0
        self._state_is_new = False
        """Whether the app has loaded state into an optimizer since the last exchange."""
        self.host_trains = False
        """Whether the app's own optimizers have taken a step on the host since the last exchange."""
        self._told: set[str] = set()
        self._followed: dict[str, _Followed] = {}
        # The optimizers are the app's, and may outlive what is loaded.
        for optimizer in machine.optimizers:
            stepped = _calling(weakref.WeakMethod(self._note_host_step))
            weakref.finalize(self, optimizer.register_step_post_hook(stepped).remove)
            loading = _calling(weakref.WeakMethod(self._note_loading))
            weakref.finalize(self, optimizer.register_load_state_dict_pre_hook(loading).remove)

    def note_exchange(self) -> None:
        """Host and device have the same weights now."""
        self._weights = self._digests()
        self.host_trains = self._state_is_new = False

    def note_run(self, kinds: Collection[SectionKind], given: Mapping[str, float], *, thoroughly: bool) -> None:
        """Sections of these kinds are about to run. `given` are the hyperparameters that `session.run` was told last.

        thoroughly: whether weights are looked at in every run, and not in a few
        """
        self._runs += 1
        if SectionKind.OPT in kinds:
            options = self._options()
            if (options, given) != self._agreed:
                now = [list(map(_number, values)) for values in options]
                self._follow(now, given)
                self._compare_groups(now, given)
                self._compare_hyperparameters(now, given)
                # Those that the host has left behind are counted in every step.
                self._agreed = None if any(one.steps_apart for one in self._followed.values()) else (now, given)
            if self._state_is_new and not self.host_trains:
                self._tell(
                    "state",
                    "the app has loaded the state of an optimizer, and the device goes on with its own",
                    "samba.session.to_device(model), or load it before trace_graph",
                )
        if thoroughly or is_looked_at(self._runs):
            if SectionKind.BCKWD in kinds or SectionKind.OPT in kinds:
                self._compare_trained()
            self._compare_weights()

    def _compare_hyperparameters(self, now: Sequence[Sequence[object]], given: Mapping[str, float]) -> None:
        for of_one, of_one_now in zip(self._hyperparameters, now, strict=False):
            for (name, before), (_, after) in zip(_named(of_one), _named(of_one_now), strict=True):
                reaches = self._reaches_device(name, after, given) if name in given else _is_same(before, after)
                if reaches:
                    continue
                on_device = given.get(name, before)
                first = on_device if _is_same(before, after) else before
                self._tell(
                    name,
                    f"the app has changed {name} of an optimizer from {_told(first)} to {_told(after)}, and the "
                    f"device goes on with {_told(on_device)}",
                    self._remedy(name, now),
                )

    def _compare_groups(self, now: Sequence[Sequence[object]], given: Mapping[str, float]) -> None:
        """What `session.run` is told goes to all groups of parameters, also where those of the host differ."""
        for name, told in given.items():
            values = [value for value in _of_each(now, name) if value is not None]  # not every optimizer has it
            if all(_is_same(value, values[0]) for value in values):
                continue
            on_host = ", ".join(dict.fromkeys(map(_told, values)))
            what = f"groups of parameters differ in {name}: {on_host}; and session.run sets {told:g} for all of them"
            self._tell(name, what, f"leave {name} out of hyperparam_dict, and change it before trace_graph")

    def _follow(self, now: Sequence[Sequence[object]], given: Mapping[str, float]) -> None:
        """Count for how many steps the host has gone on from what it had when `session.run` was told another value."""
        for name, told in given.items():
            followed = self._followed.get(name)
            if followed is None or followed.given != told:
                self._followed[name] = _Followed(told, now)
            elif now == followed.on_host or _of_each(now, name) == _of_each(followed.on_host, name):
                followed.steps_apart = 0
            else:
                followed.steps_apart += 1

    def _reaches_device(self, name: str, on_host: object, given: Mapping[str, float]) -> bool:
        """Whether the app, which tells the device of this hyperparameter, tells what the host has, as far as can be
        seen."""
        return _is_same(on_host, given[name]) or self._followed[name].steps_apart < _STEPS_LEFT_BEHIND

    def _remedy(self, name: str, now: Sequence[Sequence[object]]) -> str:
        """What makes the device train with the values that the host has `now`."""
        values = _of_each(now, name)
        optimizers = self._machine.program.optimizers
        arguments = {one.name for one in self._machine.program.runtime_arguments}
        taken = [one for one in optimizers if f"{one.name}__{name}" in arguments]
        stateless = name == "momentum" and not all(one.states for one in optimizers)
        if not taken or stateless or None in values:
            return "set it where the optimizer is made, and compile the app again: the PEF has no other"
        if any(value != values[0] for value in values):
            return f"change {name} before trace_graph: hyperparam_dict sets one value for all groups of parameters"
        if name == "lr":
            return 'session.run(…, hyperparam_dict={"lr": scheduler.get_last_lr()[0]})'
        return f'session.run(…, hyperparam_dict={{"{name}": …}}), or change it before trace_graph'

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
        if self.host_trains or "weights" in self._told:
            return
        changed = [path for path, digest in self._digests().items() if self._weights.get(path, digest) != digest]
        if changed:
            self._tell(
                "weights",
                f"the app has changed weights of the model, {changed[0]} first, and the device goes on with its own",
                "samba.session.to_device(model), or load weights before trace_graph",
            )

    def _note_host_step(self, optimizer: Optimizer, *_: object) -> None:
        # One that is left over from an app without a device finds no gradients on the host.
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self.host_trains |= any(parameter.grad is not None for parameter in parameters)

    def _note_loading(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        # What was fetched a moment ago, and is loaded again with another rate, say, is on the device already.
        self._state_is_new |= not _is_equal(state_dict["state"], optimizer.state_dict()["state"])

    def host_is_as_exchanged(self) -> bool:
        """Whether the weights of the host are those that it had when host and device last exchanged them. Those that
        are swapped for others while the app calls the model are not."""
        parameters = [parameter for _, parameter in self._parameters()]
        if self.host_trains or any(type(one.data) is not Tensor or one.is_meta for one in parameters):
            return False
        return self._digests() == self._weights

    def _tell(self, subject: str, what: str, remedy: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            telling.tell(Finding("AP05", what, app_line(), remedy))

    def _digests(self) -> Mapping[str, str]:
        """Of the parameters that are on the device too."""
        symbols = self._machine.program.symbols.values()
        on_device = {path for symbol in symbols for path in symbol.torch_names}
        return {path: tensor_sha256(one.detach()) for path, one in self._parameters() if path in on_device}

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._machine.model.named_parameters(remove_duplicate=False)

    def _options(self) -> list[list[object]]:
        """Of each group of parameters, as the app has set them."""
        return [list(map(group.get, _OPTIONS)) for one in self._machine.optimizers for group in one.param_groups]


def _is_equal(one: object, other: object) -> bool:
    """Of what a state_dict holds: tensors by their values."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


def _calling(method: "weakref.WeakMethod[Callable[..., None]]") -> Callable[..., None]:
    """A hook that calls `method` while its object lives."""

    def hook(optimizer: Optimizer, *given: object) -> None:
        alive = method()
        if alive is not None:
            alive(optimizer, *given)

    return hook


def _number(value: object) -> object:
    """Torch also takes a tensor of one element where others give a number, and changes in place what it is given: so
    betas, which are two, are numbers of our own."""
    if isinstance(value, tuple | list):
        return tuple(map(_number, value))
    return value.item() if isinstance(value, Tensor) else value


def _named(values: Sequence[object]) -> Iterator[tuple[str, object]]:
    """By the names that the device has for them."""
    for name, value in zip(_OPTIONS, values, strict=True):
        if name == "betas":
            beta1, beta2 = value if isinstance(value, tuple | list) else (None, None)
            yield from (("beta1", beta1), ("beta2", beta2))
        else:
            yield name, value


def _of_each(groups: Sequence[Sequence[object]], name: str) -> list[object]:
    return [dict(_named(values)).get(name) for values in groups]


def _is_same(before: object, after: object) -> bool:
    if isinstance(before, int | float) and isinstance(after, int | float):
        return math.isclose(before, after, rel_tol=_NUMBERS_OF_A_TENSOR)
    return before == after


def _told(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
