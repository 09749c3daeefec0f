"""AP05, AP06, AP07: weights and optimizers that host and device do not exchange; DP02 for backwards of a step.

The device has its own weights, and the hyperparameters that the optimizers had in `trace_graph`. If the host takes
optimizer steps of its own, for comparison, its weights are not compared.
"""

import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sambasim.commands.torch_optimizers import plain_number
from sambasim.compiler.capture.tensors import held_by
from sambasim.data.batches import same
from sambasim.ir.graph import SectionKind
from sambasim.ir.types import SymbolKind
from sambasim.runtime.values.memory import tensor_sha256
from sambasim.samba import process
from sambasim.samba.checks.watched import BOUNDS, watch
from sambasim.samba.device import Machine
from sambasim.samba.process import Code, is_called_by_app
from sambasim.samba.request import Optimizer
from sambasim.units import counted, first_of

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


def is_sampled(step: int) -> bool:
    """Whether `step`, which counts from 1, is 1, 2, 8, 64, 512 …: the steps in which slow checks run."""
    return step == 2 or 8 ** round(math.log(step, 8)) == step


class Host:
    """What host and device had in common at the last exchange, for one loaded PEF, and what each has done since."""

    def __init__(self, machine: Machine) -> None:
        self.model = machine.model
        self._machine = machine
        self.options = HostOptions(machine)
        self._requires_grad = {path: parameter.requires_grad for path, parameter in self._parameters()}
        self._weights: Mapping[str, str] = {}
        self._steps_at_exchange = self._runs = self._backwards = 0
        self._backwards_wanted = int(process.current().flag("grad_accumulation_steps") or 1)  # of the first step
        self._host_trains = False  # whether the app's own optimizers have taken a step since the last exchange
        self._host_has_loaded = False  # other weights into the model, for example the best ones of an earlier time
        self._state_is_new = False
        self._reported: set[str] = set()
        self._compared: dict[str, int] = {}  # by use, the last step in which weights were compared: it takes time
        for optimizer in machine.optimizers:
            for register, note in (
                (optimizer.register_step_post_hook, self._note_host_step),
                (optimizer.register_load_state_dict_pre_hook, self._note_loading),
            ):
                weakref.finalize(self, register(_hook(weakref.WeakMethod(note))).remove)
        watch(self, _changed_by(machine))

    def note_exchange(self) -> None:
        """Host and device have the same weights now."""
        self._weights = self._digests()
        self._steps_at_exchange = self._machine.replica.steps
        self._host_trains = self._host_has_loaded = self._state_is_new = False

    def note_run(self, kinds: Collection[SectionKind], given: Mapping[str, float], *, thoroughly: bool) -> None:
        """Sections of `kinds` are about to run with the hyperparameters `given`; `thoroughly`: compares every time."""
        self._runs += 1
        self._backwards += SectionKind.BCKWD in kinds
        if SectionKind.OPT in kinds:
            if self._backwards_wanted not in (1, self._backwards):
                made, wanted = counted(self._backwards, "backward"), self._backwards_wanted
                what = f"--grad-accumulation-steps is {wanted}, but the optimizer step follows {made}"
                remedy = 'section_types=["FWD", "BCKWD"] for each batch, then ["OPT"] once'
                process.report_here("DP02", what, remedy)
            self._backwards, self._backwards_wanted = 0, 1
            for different in self.options.compare(given):
                self._report("AP05", *different)
            if self._state_is_new and not self._host_trains:
                what = "the app has loaded the state of an optimizer, and the device continues with its own"
                self._report("AP05", "state", what, "samba.session.to_device(model), or load it before trace_graph")
        if thoroughly or is_sampled(self._runs):
            if SectionKind.BCKWD in kinds or SectionKind.OPT in kinds:
                self._compare_requires_grad()
            self._compare_weights()
        if self._backwards == 256:  # no app accumulates the gradients of so many before its first optimizer step
            self._report_backwards()

    def note_fetch(self) -> None:
        """The weights of the device are about to replace those of the host."""
        if self._backwards and not self._machine.replica.steps:
            self._report_backwards()
        elif self._host_trains and self._ahead == 0 and process.current().trains:
            what = "to_cpu overwrites weights that the app has trained on the host, and the device has trained none"
            remedy = "session.run(…) for backward() and optimizer.step(); or leave to_cpu out"
            self._report("AP07", "AP07", what, remedy)

    def note_replacement(self) -> None:
        """`trace_graph` is about to load another PEF for the same model, with the weights of the host."""
        if self._ahead > 0 and process.current().trains:
            self._report_behind("trace_graph loads the weights of", "before trace_graph")

    def note_load(self) -> None:
        self._host_has_loaded = True

    def note_read(self, use: str) -> None:
        if self._is_behind(use):
            self._report_behind(f"the app {use} the weights on", "before it")

    def note_clipping(self, function: str, parameters: list[Tensor], arguments: Mapping[str, Any]) -> None:
        """AP05 if the PEF does not clip."""
        bound = float(arguments[BOUNDS[function]])
        if not (math.isfinite(bound) and process.current().trains):  # with an infinite bound, it only reads the norm
            return
        training = self._machine.program.training
        clips = training is None or any(section.kind is SectionKind.GRADNORM for section in training.sections)
        clipped = {id(parameter) for parameter in parameters}
        trained = {id(parameter) for parameter in self.model.parameters() if parameter.requires_grad}
        # No mistake: the device clips too, or these are not of the model, or the host has gradients of its own.
        if clips or clipped.isdisjoint(trained) or any(parameter.grad is not None for parameter in parameters):
            return
        has_equivalent = function == "clip_grad_norm_" and arguments.get("norm_type", 2.0) == 2 and trained <= clipped
        norm = bound if has_equivalent else "…"
        call = f"samba.optim.{type(self._machine.optimizers[0]).__name__}(…, max_grad_norm={norm})"
        remedy = f"{call}, a bound of the 2-norm of all gradients together; then compile the app again"
        self._report("AP05", "clipping", "the app clips gradients on the host, and the device does not", remedy)

    @property
    def _ahead(self) -> int:
        return self._machine.replica.steps - self._steps_at_exchange

    def _is_behind(self, use: str) -> bool:
        """Whether the app uses out-of-date weights. Compares weights once a step for each kind of use, and never while
        torch transforms the model, because the comparison would become part of the result."""
        steps, is_reported = self._machine.replica.steps, f"the app {use} the weights on" in self._reported
        if self._ahead <= 0 or self._compared.get(use) == steps or self._host_has_loaded or is_reported:
            return False
        is_transforming = (
            torch.jit.is_tracing()  # type: ignore[no-untyped-call]  # torch gives it no types
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch._C._len_torch_dispatch_stack() > 0
        )
        if is_transforming or not process.current().trains or not is_called_by_app():
            return False
        self._compared[use] = steps
        if self._host_trains or any(type(now.data) is not Tensor or now.is_meta for _, now in self._parameters()):
            return False  # other tensors are in their place for now
        return self._digests() == self._weights

    def _compare_requires_grad(self) -> None:
        now = {path: parameter.requires_grad for path, parameter in self._parameters()}
        if changed := [path for path, trains in now.items() if self._requires_grad.get(path, trains) != trains]:
            trains = now[changed[0]]
            what = f"requires_grad of {first_of(changed, 1)} is {trains} now, and still {not trains} on the device"
            remedy = "set it where the model is made, and compile the app again: a PEF contains what is trained"
            self._report("AP05", "requires_grad", what, remedy)

    def _compare_weights(self) -> None:
        if self._host_trains or "weights" in self._reported:
            return
        now = self._digests()
        if changed := [path for path, digest in now.items() if self._weights.get(path, digest) != digest]:
            what = f"the app has changed weights of the model, first {changed[0]}, and the device keeps its own"
            self._report("AP05", "weights", what, "samba.session.to_device(model), or load weights before trace_graph")

    def _note_host_step(self, optimizer: Optimizer, *_: object) -> None:
        # Without gradients on the host, its optimizer.step() changes nothing.
        self._host_trains |= any(
            parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"]
        )

    def _note_loading(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        # State that was just fetched is on the device already.
        self._state_is_new |= not same(state_dict["state"], optimizer.state_dict()["state"])

    def _report_behind(self, use: str, when: str) -> None:
        what = f"{use} the host, and the device has trained for {counted(self._ahead, 'step')} since"
        self._report("AP06", use, what, f"samba.session.to_cpu(model) {when}")

    def _report_backwards(self) -> None:
        what = f"the device has run {counted(self._backwards, 'backward')} and no optimizer step, so nothing is trained"
        remedy = 'add "OPT" to section_types, or leave section_types out: an optimizer.step() on the host has no effect'
        if process.current().trains and not self._machine.replica.steps:
            self._report("AP07", "AP07", what, remedy)

    def _report(self, code: Code, subject: str, what: str, remedy: str) -> None:
        if subject not in self._reported:
            self._reported.add(subject)
            process.report_here(code, what, remedy)

    def _digests(self) -> Mapping[str, str]:
        """By path, a digest of each parameter that is on the device too."""
        on_device = {path for symbol in self._machine.program.symbols.values() for path in symbol.torch_names}
        return {path: tensor_sha256(parameter.detach()) for path, parameter in self._parameters() if path in on_device}

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((held.name, held.tensor) for held in held_by(self.model) if held.is_parameter)


def _changed_by(machine: Machine) -> Iterator[nn.Module]:
    """The modules that hold, directly or below, a parameter that the device trains or a buffer that it changes."""
    program = machine.program
    changed = {member.parameter for group in program.groups for member in group.members}
    if program.training is not None:
        outputs = {output.symbol for output in program.training.outputs}
        changed |= {name for name in outputs if program.symbols[name].kind is SymbolKind.BUFFER}
    names = {name for symbol in changed for name in program.symbols[symbol].torch_names}
    tensors = {id(held.tensor) for held in held_by(machine.model) if not names.isdisjoint(held.names)}
    for module in machine.model.modules():
        if any(id(tensor) in tensors for tensor in (*module.parameters(), *module.buffers())):
            yield module


def _hook(method: "weakref.WeakMethod[Callable[..., None]]") -> Callable[..., None]:
    """Calls `method` as long as its object exists: the optimizers belong to the app, and may outlive it."""

    def hook(*arguments: object) -> None:
        if (alive := method()) is not None:
            alive(*arguments)

    return hook
