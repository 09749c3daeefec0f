"""AP05: changes on the host that do not reach the device.

The device has its own weights, and the hyperparameters that the optimizers had in `trace_graph`. It clips gradients
only by `max_grad_norm`, the 2-norm of all of them. If the host takes optimizer steps of its own, for comparison, its
weights are not compared.
"""

import inspect
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad

from sambasim.commands.torch_optimizers import plain_number
from sambasim.compiler.capture.tensors import held_by
from sambasim.ir.graph import SectionKind
from sambasim.runtime.values.weights import tensor_sha256
from sambasim.samba import context
from sambasim.samba.checks.findings import Finding, app_line, reporter
from sambasim.samba.machine import Machine
from sambasim.samba.request import Optimizer

_OPTIONS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "betas", "eps", "max_grad_norm")
_FLOAT32_PRECISION = 1e-6
"""A learning rate may be a tensor of float32."""

_LATE_STEPS = 3
"""An app may pass the value of an earlier step to the device, up to so many steps late."""

_SET_AND_COMPILE = "set it where the optimizer is made, and compile the app again: the PEF has no other"


def is_sampled(step: int) -> bool:
    """Whether `step`, which counts from 1, is 1, 2, 8, 64, 512 …: the steps in which slow checks run."""
    if step == 2:
        return True
    while step and step % 8 == 0:
        step //= 8
    return step == 1


@dataclass(slots=True)
class _Passed:
    """A hyperparameter that `session.run` got, the options of the host at that time, and for how many steps the host
    has had another value of it since."""

    value: float
    on_host: Sequence[Sequence[object]]
    steps_apart: int = 0


_BOUNDS: Mapping[str, str] = {
    "clip_grad_norm_": "max_norm",
    "_clip_grads_with_norm_": "max_norm",  # `torch.nn.utils.clip_grads_with_norm_`
    "clip_grad_value_": "clip_value",
}
"""Functions of torch that clip gradients, and the argument of each that is the bound."""

_loaded: "weakref.WeakSet[Unsent]" = weakref.WeakSet()


class Unsent:
    """What host and device had in common at the last exchange, for one loaded PEF."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._at_trace = [list(map(plain_number, values)) for values in self._options()]
        self._agreed: object = None  # options of the host and hyperparameters given, in a step without difference
        self._requires_grad = {path: parameter.requires_grad for path, parameter in self._parameters()}
        self._weights: Mapping[str, str] = {}
        self._runs = 0
        self._state_is_new = False
        self.host_trains = False
        """Whether the app's own optimizers have taken a step since the last exchange."""
        self._reported: set[str] = set()
        self._passed: dict[str, _Passed] = {}
        # The optimizers belong to the app, and may outlive this.
        for optimizer in machine.optimizers:
            stepped = _hook(weakref.WeakMethod(self._note_host_step))
            weakref.finalize(self, optimizer.register_step_post_hook(stepped).remove)
            loading = _hook(weakref.WeakMethod(self._note_loading))
            weakref.finalize(self, optimizer.register_load_state_dict_pre_hook(loading).remove)
        _loaded.add(self)
        _watch_clipping()

    def note_exchange(self) -> None:
        """Host and device have the same weights now."""
        self._weights = self._digests()
        self.host_trains = self._state_is_new = False

    def note_run(self, kinds: Collection[SectionKind], given: Mapping[str, float], *, thoroughly: bool) -> None:
        """Sections of `kinds` are about to run with the hyperparameters `given`.

        thoroughly: compare weights in every run, not in a few
        """
        self._runs += 1
        if SectionKind.OPT in kinds:
            options = self._options()
            if (options, given) != self._agreed:
                now = [list(map(plain_number, values)) for values in options]
                self._follow(now, given)
                self._compare_groups(now, given)
                self._compare_hyperparameters(now, given)
                # While the host differs, each step counts.
                self._agreed = None if any(one.steps_apart for one in self._passed.values()) else (now, given)
            if self._state_is_new and not self.host_trains:
                what = "the app has loaded the state of an optimizer, and the device continues with its own"
                self._report("state", what, "samba.session.to_device(model), or load it before trace_graph")
        if thoroughly or is_sampled(self._runs):
            if SectionKind.BCKWD in kinds or SectionKind.OPT in kinds:
                self._compare_requires_grad()
            self._compare_weights()

    def note_clipping(self, function: str, parameters: list[Tensor], arguments: Mapping[str, Any]) -> None:
        """The app calls `function`, one of `_BOUNDS`, for these parameters."""
        bound = float(arguments[_BOUNDS[function]])
        if not (math.isfinite(bound) and context.current().trains):  # with an infinite bound, it only reads the norm
            return
        training = self._machine.program.training
        clips = training is None or any(section.kind is SectionKind.GRADNORM for section in training.sections)
        given = {id(one) for one in parameters}
        trained = {id(one) for one in self._machine.model.parameters() if one.requires_grad}
        if clips or given.isdisjoint(trained) or any(one.grad is not None for one in parameters):
            return
        is_same = function == "clip_grad_norm_" and arguments.get("norm_type", 2.0) == 2 and trained <= given
        optimizer = type(self._machine.optimizers[0]).__name__
        self._report(
            "clipping",
            "the app clips gradients on the host, and the device does not",
            f"samba.optim.{optimizer}(…, max_grad_norm={bound if is_same else '…'}), a bound of the 2-norm of all "
            "gradients together; then compile the app again",
        )

    def host_is_as_exchanged(self) -> bool:
        """Whether the host still has the weights of the last exchange, and no others in their place for now."""
        parameters = [parameter for _, parameter in self._parameters()]
        if self.host_trains or any(type(one.data) is not Tensor or one.is_meta for one in parameters):
            return False
        return self._digests() == self._weights

    def _follow(self, now: Sequence[Sequence[object]], given: Mapping[str, float]) -> None:
        """Count for how many steps the host has another value than when `session.run` got a new one."""
        for name, value in given.items():
            passed = self._passed.get(name)
            if passed is None or passed.value != value:
                self._passed[name] = _Passed(value, now)
            elif _of_each(now, name) == _of_each(passed.on_host, name):
                passed.steps_apart = 0
            else:
                passed.steps_apart += 1

    def _compare_groups(self, now: Sequence[Sequence[object]], given: Mapping[str, float]) -> None:
        """`session.run` sets one value for all parameter groups."""
        for name, value in given.items():
            values = [one for one in _of_each(now, name) if one is not None]  # not every optimizer has it
            if not all(_is_same(one, values[0]) for one in values):
                on_host = ", ".join(dict.fromkeys(map(_shown, values)))
                what = f"parameter groups differ in {name}: {on_host}; and session.run sets {value:g} for all of them"
                self._report(name, what, f"leave {name} out of hyperparam_dict, and change it before trace_graph")

    def _compare_hyperparameters(self, now: Sequence[Sequence[object]], given: Mapping[str, float]) -> None:
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
                self._report(name, what, self._remedy(name, now))

    def _remedy(self, name: str, now: Sequence[Sequence[object]]) -> str:
        """How to send hyperparameter `name` to the device; `now` holds the options of each parameter group."""
        values = _of_each(now, name)
        optimizers = self._machine.program.optimizers
        arguments = {one.name for one in self._machine.program.runtime_arguments}
        taken = [one for one in optimizers if f"{one.name}__{name}" in arguments]
        stateless = name == "momentum" and not all(one.states for one in optimizers)
        if not taken or stateless or None in values:
            return _SET_AND_COMPILE
        if any(value != values[0] for value in values):
            return f"change {name} before trace_graph: hyperparam_dict sets one value for all parameter groups"
        if name == "lr":
            return 'session.run(…, hyperparam_dict={"lr": scheduler.get_last_lr()[0]})'
        return f'session.run(…, hyperparam_dict={{"{name}": …}}), or change it before trace_graph'

    def _compare_requires_grad(self) -> None:
        now = {path: parameter.requires_grad for path, parameter in self._parameters()}
        changed = [path for path, trains in now.items() if self._requires_grad.get(path, trains) != trains]
        if changed:
            first, more = changed[0], f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            what = f"requires_grad of {first}{more} is {now[first]} now, and still {not now[first]} on the device"
            remedy = "set it where the model is made, and compile the app again: a PEF contains what is trained"
            self._report("requires_grad", what, remedy)

    def _compare_weights(self) -> None:
        if self.host_trains or "weights" in self._reported:
            return
        changed = [path for path, digest in self._digests().items() if self._weights.get(path, digest) != digest]
        if changed:
            what = f"the app has changed weights of the model, first {changed[0]}, and the device keeps its own"
            self._report("weights", what, "samba.session.to_device(model), or load weights before trace_graph")

    def _note_host_step(self, optimizer: Optimizer, *_: object) -> None:
        # Without gradients on the host, its optimizer.step() changes nothing.
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        self.host_trains |= any(parameter.grad is not None for parameter in parameters)

    def _note_loading(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        # State that was just fetched is on the device already.
        self._state_is_new |= not _is_equal(state_dict["state"], optimizer.state_dict()["state"])

    def _report(self, subject: str, what: str, remedy: str) -> None:
        if subject not in self._reported:
            self._reported.add(subject)
            reporter.report(Finding("AP05", what, app_line(), remedy))

    def _digests(self) -> Mapping[str, str]:
        """By path, a digest of each parameter that is on the device too."""
        symbols = self._machine.program.symbols.values()
        on_device = {path for symbol in symbols for path in symbol.torch_names}
        return {path: tensor_sha256(one.detach()) for path, one in self._parameters() if path in on_device}

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((one.name, one.tensor) for one in held_by(self._machine.model) if one.is_parameter)

    def _options(self) -> list[list[object]]:
        """The values of `_OPTIONS` in each parameter group of the host."""
        return [list(map(group.get, _OPTIONS)) for one in self._machine.optimizers for group in one.param_groups]


def _is_equal(one: object, other: object) -> bool:
    """Whether two state_dicts are equal, tensors by value."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


def _hook(method: "weakref.WeakMethod[Callable[..., None]]") -> Callable[..., None]:
    def hook(optimizer: Optimizer, *given: object) -> None:
        alive = method()
        if alive is not None:
            alive(optimizer, *given)

    return hook


def _named(values: Sequence[object]) -> Iterator[tuple[str, object]]:
    """Pairs of name and value; `betas` as beta1 and beta2, which are their names on the device."""
    for name, value in zip(_OPTIONS, values, strict=True):
        if name == "betas":
            beta1, beta2 = value if isinstance(value, tuple | list) else (None, None)
            yield from (("beta1", beta1), ("beta2", beta2))
        else:
            yield name, value


def _of_each(groups: Sequence[Sequence[object]], name: str) -> list[object]:
    """The value of hyperparameter `name` in each parameter group."""
    return [dict(_named(values)).get(name) for values in groups]


def _is_same(before: object, after: object) -> bool:
    if isinstance(before, int | float) and isinstance(after, int | float):
        return math.isclose(before, after, rel_tol=_FLOAT32_PRECISION)
    return before == after


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


@cache
def _watch_clipping() -> None:
    """Watch clipping from now on.

    The app may have imported these functions before, under any name. Each is a wrapper that holds the real function in
    a closure cell; replacing the cell reaches all names. A torch without these wrappers is not watched.
    """
    for name in _BOUNDS:
        wrapper = getattr(clip_grad, name, None)
        for cell in getattr(wrapper, "__closure__", None) or ():
            if inspect.isfunction(cell.cell_contents) and cell.cell_contents.__name__ == name:
                cell.cell_contents = _watched(name, cell.cell_contents)


def _watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def clip(*given: Any, **keywords: Any) -> Any:
        try:
            called = signature.bind(*given, **keywords)
        except TypeError:
            return original(*given, **keywords)  # which raises
        parameters = called.arguments["parameters"]
        listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        called.arguments["parameters"] = listed or parameters  # torch warns of an empty generator
        for unsent in list(_loaded):
            unsent.note_clipping(name, listed, called.arguments)
        return original(*called.args, **called.kwargs)

    return clip
