"""What a real call of a step changes in Python, beside its tensors, and whether later calls depend on it. A graph loses
all of that: so either nothing reads it, which is a notice, or the step is refused with the slot and its line."""

import contextlib
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from sambasim.compiler.as_eager import kernels_of_eager, known_shapes
from sambasim.compiler.asked_values import Asked, modes_reach_inside
from sambasim.compiler.explain import Finding, Obstacle, all_findings, changed_constants, obstacles
from sambasim.compiler.names import is_library_file
from sambasim.compiler.recording import Recording, line_of
from sambasim.compiler.snapshot import FEW, MISSING, NUMBERS, Slot, Snapshot, perturbed, process_state, vary
from sambasim.compiler.step import EvaluationStep, TrainingStep, check_loss, eagerly, loss_in
from sambasim.compiler.trial import PLAIN, no_gradients_kept, quiet
from sambasim.errors import CaptureError
from sambasim.forks import Fork

_MOST_ELEMENTS = 20_000_000
"""Where a call makes more elements of tensors, it is repeated only if it has changed something."""

_MOST_PARAMETERS = 20_000_000

_MOST_ALONE = 8
"""So many changed slots are varied one by one."""

_OF_PYTHON, _OF_NUMPY = "random numbers of Python", "random numbers of NumPy"

_COUNTED = 'count in a buffer: self.register_buffer("steps", torch.zeros(())), and self.steps.add_(1)'
_COPIED = 'keep it in a buffer, self.register_buffer("last", torch.zeros(size)), and copy into it: self.last.copy_(…)'
_REWRITES = {
    "value": _COUNTED,
    "tensor": _COPIED,
    "content": _COPIED,
    "position": "draw random numbers by PyTorch, torch.rand(()); keep other values in a buffer",
}
_FIRST_CALL = (
    "compute it before, in __init__; or keep the value and a flag in buffers, and choose by "
    "torch.where(self.is_set, self.value, …)"
)
_DIFFERS = Obstacle(
    "a value that differs from call to call, though nothing that the model can reach has changed",
    "give it to the model as an input, or compute it before",
)
_GENERATOR = Obstacle(
    "a torch.Generator of its own, whose state a graph does not keep", "leave out generator=, which draws from torch's"
)
_SEEDED = Obstacle(
    "a seed or a state of the generator of random numbers, which a graph does not set",
    "draw the numbers once, and keep them in a buffer: self.register_buffer(name, torch.randn(…))",
)


_one_thread = partial(torch.set_num_threads, 1)
"Of a copy of this process, which has no other threads of OpenMP."

_LAST_PART = re.compile(r"(\.[^.\[]*|\[[^\[]*\]|^[^.\[]*)$")


@dataclass(frozen=True, slots=True)
class Observed:
    """What the first call of each step was: its operators, and what it asks of values. `kept`: slots that calls change
    and nothing reads."""

    calls: Mapping[nn.Module, Recording]
    asked: Mapping[nn.Module, Asked]
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Round:
    """One call of each step."""

    calls: list[Recording] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)

    @property
    def writes(self) -> list[tuple[str, ...]]:
        """Labels of the tensors that existed before and are changed."""
        return [op.writes for call in self.calls for op in call.ops if op.writes]

    @property
    def texts(self) -> list[str]:
        return [op.text for call in self.calls for op in call.ops]


def _is_changed(slot: Slot, mark: object) -> bool:
    return slot.now() != mark


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """Afterwards all generators of random numbers are as they were."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def observe(
    steps: Sequence[nn.Module], inputs: Sequence[Tensor], loss: str | None = None, *, always: bool = False
) -> Observed:
    """Call each of `steps`, which have one model, and again as far as they change anything. Caches are filled
    afterwards, and tensors have their values again. `loss`: the name of the loss. A large model is not called, unless
    `always`, if a call on tensors without memory changes nothing. Raises CaptureError for state that a graph would
    lose, and ModelError if PyTorch cannot run a step."""
    observer = _Observer(steps, inputs, loss)
    if not always and sum(one.numel() for one in steps[0].parameters()) > _MOST_PARAMETERS and observer.is_sound():
        return Observed({}, {step: Asked() for step in steps})
    return observer.run()


def asked_of(step: nn.Module, inputs: Sequence[Tensor]) -> Asked:
    """What one call of `step` asks of values. Raises ModelError if it fails."""
    done = _Round()
    _Observer([step], inputs, None).call(step, done)
    return done.asked[0]


class _Observer:
    def __init__(self, steps: Sequence[nn.Module], inputs: Sequence[Tensor], loss: str | None) -> None:
        self._steps = steps
        self._inputs = inputs
        self._loss = loss
        self._roots = {
            "model": steps[0].get_submodule("model"),
            "loss": getattr(steps[0], "loss", None),
            _OF_PYTHON: vars(random)["_inst"],
            _OF_NUMPY: vars(np.random.mtrand)["_rand"],
        }
        self._is_fake = any(isinstance(one, FakeTensor) for one in (*inputs, *steps[0].parameters()))
        self._named: dict[str, Tensor] = {f"parameter {name}": one for name, one in steps[0].named_parameters()}
        self._named |= {f"buffer {name}": one for name, one in steps[0].named_buffers()}
        self._modes = [(module, module.training) for module in steps[0].modules()]
        self._fresh: Fork[Any] | None = None
        self._recording: Recording | None = None

    def run(self) -> Observed:
        with contextlib.ExitStack() as stack:
            if not self._is_fake:
                self._fresh = Fork(lambda request: getattr(self, request[0])(*request[1:]), _one_thread)
                stack.callback(self._fresh.close)
            if self._is_fake:  # as in a capture
                stack.enter_context(kernels_of_eager())
                stack.enter_context(known_shapes())
            stack.enter_context(_generators_kept())
            stack.callback(self._set_modes, self._steps[0])
            process, before = process_state(), Snapshot(self._roots)
            self._named = before.registered() | self._named
            first = self._round()
            after = Snapshot(self._roots)
            for asked in first.asked:
                asked.names = after.names_of_tensors()
                asked.refuse_changed({label for labels in first.writes for label in labels})
            self._check_process(process)
            self._check_calls(first)
            changed = before.changed_in(after)
            self._check_replaced(changed)
            is_large = sum(call.made_elements for call in first.calls) > _MOST_ELEMENTS
            if not changed and (self._is_fake or is_large):
                return self._observed(first)
            second = self._round(2)
            again = after.changed_in(Snapshot(self._roots))
            if not changed and not again:
                self._check_equal(first, second)
                return self._observed(first)
            names = [slot.name for slot in again]
            only_first = [slot for slot in changed if not any(name.startswith(slot.name) for name in names)]
            if only_first and (
                first.writes != second.writes or self._ask("after_another_first") not in (None, second.texts)
            ):
                raise self._refused_first(only_first)
            if again:
                self._check_read(again, second)
            self.call(self._steps[0], _Round())  # so that it is not what an evaluation leaves behind
            return self._observed(first, again)

    def is_sound(self) -> bool:
        """Whether a call on tensors without memory shows that a step does nothing beside its tensors."""
        if self._is_fake:
            return False
        fork: Fork[bool] = Fork(lambda request: self._on_fakes(), _one_thread)
        is_sound = fork.ask()
        fork.close()
        return bool(is_sound)

    def _on_fakes(self) -> bool:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes: dict[int, Tensor] = {}
        places: list[dict[str, Any]]
        places = [held for one in self._steps[0].modules() for held in (one._parameters, one._buffers)]
        for held in places:
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = fakes.setdefault(id(tensor), mode.from_tensor(tensor))
        with mode, kernels_of_eager(), known_shapes():
            observer = _Observer(self._steps, [mode.from_tensor(one) for one in self._inputs], self._loss)
            process, before = process_state(), Snapshot(self._roots)
            done = observer._round()
            same = not before.changed_in(Snapshot(self._roots)) and process == process_state()
        ops = [op for call in done.calls for op in call.ops]
        return (
            same
            and not any(call.seeded or changed_constants(call) for call in done.calls)
            and not any(op.draws_from or op.asks for op in ops)
        )

    def _observed(self, first: _Round, kept: Sequence[Slot] = ()) -> Observed:
        names = dict.fromkeys(slot.name for slot in kept if slot.name not in (_OF_PYTHON, _OF_NUMPY))
        calls = dict(zip(self._steps, first.calls, strict=True))
        return Observed(calls, dict(zip(self._steps, first.asked, strict=True)), tuple(names))

    def _ask(self, *request: object) -> Any:
        """What a fresh copy of the process, in which nothing was called yet, says."""
        return None if self._fresh is None else self._fresh.ask(request)

    def _round(self, seed: int = 1) -> _Round:
        done = _Round()
        for step in self._steps:
            torch.manual_seed(seed)
            self.call(step, done)
        return done

    def _set_modes(self, step: nn.Module) -> None:
        if isinstance(step, EvaluationStep):
            step.eval()
        else:
            step.get_submodule("model").train()  # a model's own method may do more
            for module, is_training in self._modes:
                module.training = is_training

    def call(self, step: nn.Module, done: _Round) -> None:
        given = [one.detach().clone().requires_grad_(one.requires_grad) for one in self._inputs]
        named = self._named | {f"input {index}": one for index, one in enumerate(given)}
        recording = self._recording = Recording(named)
        asked = Asked(recording)
        self._set_modes(step)
        try:
            with eagerly(step, given), quiet(), modes_reach_inside(), recording, asked:
                outputs = step(*given)
            if isinstance(step, TrainingStep):
                check_loss(loss_in(outputs), self._loss, any_shape=step.any_loss)
                with eagerly(step, given), quiet(), no_gradients_kept(step), recording:
                    torch.autograd.backward(loss_in(outputs).sum())
            recording.ends()
        finally:
            recording.undo()
        done.calls.append(recording)
        done.asked.append(asked)

    def after_another_first(self) -> list[str]:
        """The operators of a second round, where the first one has other inputs, parameters, buffers and seeds."""
        held = {id(one): one for one in (*self._steps[0].parameters(), *self._steps[0].buffers())}
        own = {key: one.detach().clone() for key, one in held.items()}
        inputs, states = self._inputs, (random.getstate(), np.random.get_state())
        with torch.no_grad():
            for one in held.values():
                one.copy_(perturbed(one))
        random.seed(77)
        np.random.seed(77)
        for number in (1, 0):  # values may be checked: then as they were
            self._inputs = [perturbed(one) if number else one for one in inputs]
            with contextlib.suppress(Exception):
                self._round(77)
                break
        self._inputs = inputs
        with torch.no_grad():
            for key, one in held.items():
                one.copy_(own[key])
        random.setstate(states[0])
        np.random.set_state(states[1])
        return self._round(2).texts

    def _check_process(self, before: Mapping[str, object]) -> None:
        now = process_state()
        for name, value in before.items():
            if now[name] != value:
                obstacle = Obstacle(f"{name} of the process, which forward() changes", "set it outside of the model")
                raise self._refused(obstacle, self._ask("line_of_process", name))

    def _check_calls(self, first: _Round) -> None:
        for call in first.calls:
            own = next((op for op in call.ops if op.draws_from), None)
            if own is not None:
                raise self._refused(_GENERATOR, str(own.line or ""))
            if found := changed_constants(call):
                raise all_findings(found, self._steps[0].training)
            if call.seeded:
                raise self._refused(_SEEDED, self._ask("line_of_seed"))

    def _check_replaced(self, changed: Sequence[Slot]) -> None:
        for slot in changed:
            if slot.before is MISSING and isinstance(slot.value, nn.Parameter) and slot.value.requires_grad:
                what = f"{slot.name}, a parameter that forward() makes, and that an optimizer made before does not have"
                raise self._refused(Obstacle(what, "make it in __init__"), self._line_of(slot))
            if slot.is_registered and isinstance(slot.before, Tensor) and not hasattr(slot.before, PLAIN):
                name = slot.name.removeprefix("model.")
                kind = "parameter" if isinstance(slot.value, nn.Parameter) else "buffer"
                what = f"the {kind} {name}, which forward() replaces, where a graph changes tensors in place"
                rewrite = f"copy into it: self.{name.rpartition('.')[2]}.copy_(…)"
                raise self._refused(Obstacle(what, rewrite), self._line_of(slot))

    def _check_equal(self, one: _Round, other: _Round) -> None:
        if one.texts != other.texts:
            if found := dict.fromkeys(finding for call in one.calls for finding in obstacles(call)):
                raise all_findings([*found], self._steps[0].training)
            ops = [two for a, b in zip(one.calls, other.calls, strict=True) for two in zip(a.ops, b.ops, strict=False)]
            line = next((now.line for before, now in ops if before.text != now.text), None)
            raise self._refused(_DIFFERS, str(line or ""))

    def _refused_first(self, changed: Sequence[Slot]) -> CaptureError:
        slot = next((slot for slot in changed if slot.kind == "tensor"), changed[0])
        what = f"{slot.name}, which the first call sets, and which depends on that call's inputs, weights or draws"
        return self._refused(Obstacle(what, _FIRST_CALL), self._line_of(slot))

    def _check_read(self, changed: Sequence[Slot], last: _Round) -> None:
        """Raises CaptureError for a slot, of those that each call changes, on which the operators of a call depend, or
        may depend."""
        is_read = self._round(3).texts != last.texts
        few = is_read or self._is_fake or sum(call.made_elements for call in last.calls) > _MOST_ELEMENTS
        trials = FEW if few else range(len(NUMBERS))
        found: Any = -1
        if not self._is_fake:
            fork: Fork[Any] = Fork(
                lambda others: self._first_read(changed, trials) if others is None else self._carried(others),
                _one_thread,
            )
            found = fork.ask()
            is_read |= fork.ask(True) not in (None, fork.ask(False))
            fork.close()
        if is_read or found is None or found >= 0:
            likely = next((index for index, slot in enumerate(changed) if slot.kind == "tensor"), 0)
            slot = changed[likely if found in (None, -1) else found]
            what = f"{slot.name}, which each call changes, and on which later calls depend"
            raise self._refused(Obstacle(what, _REWRITES[slot.kind]), self._line_of(slot))

    def _carried(self, others: bool) -> list[list[str]]:
        """The operators of each step after a call of each, which has had other inputs and seeds if `others`."""
        own, found = self._inputs, []
        for before in self._steps:
            for after in self._steps:
                self._inputs = [perturbed(one) for one in own] if others else own
                torch.manual_seed(77 if others else 1)
                self.call(before, _Round())
                self._inputs, done = own, _Round()
                torch.manual_seed(1)
                self.call(after, done)
                found.append(done.texts)
        return found

    def _first_read(self, changed: Sequence[Slot], trials: Sequence[int]) -> int:
        """The index of the first slot without which a call is another; -1 if no variation changes a call."""
        if len(changed) <= _MOST_ALONE:
            expected = self._varied(changed, (), 0)
            for index, slot in enumerate(changed):
                for number in trials:
                    if expected is None or self._varied(changed, (slot,), number) != expected:
                        return index
        expected = self._varied((), (), 0)
        for number in trials:
            if self._varied((), changed, number) != expected or self._varied((), (), 0) != expected:
                return 0
        return -1

    def _varied(self, kept: Sequence[Slot], varied: Sequence[Slot], number: int) -> list[str] | None:
        """The operators of a round, before which the slots of `kept` are as they were after the last one, and `varied`
        have other values; None if it fails."""
        try:
            for slot in kept:
                if slot.kind in ("value", "tensor"):
                    slot.set(slot.value)
            for slot in varied:
                vary(slot, number)
            return self._round().texts
        except Exception:
            return None

    def _line_of(self, slot: Slot) -> str | None:
        line: str | None = self._ask("line_of_slot", slot.name, slot.kind)
        return line

    def line_of_slot(self, name: str, kind: str) -> str | None:
        """The line of a first call that changes a slot first, or else what it is in."""
        before = Snapshot(self._roots)
        after: Fork[Any] = Fork(lambda request: self._places_after(name), _one_thread)
        places: dict[str, tuple[int, object]] = after.ask() or {}
        after.close()
        if (root := before.slots.get((name, kind, 0))) and name in self._roots:
            return self._traced(partial(_is_changed, root, root.mark))
        owners = before.owners()
        for one, (owner, key) in places.items():
            content = before.slots.get((one, "content", 0)) or before.slots.get((one, "position", 0))
            slot = content if one == name and kind in ("content", "position") else None
            if slot is None and owner in owners and owners[owner] is not None:
                slot = Slot(one, "value", owners[owner], key, None)
            if slot is not None:
                return self._traced(partial(_is_changed, slot, slot.now()))
        return None

    def _places_after(self, name: str) -> dict[str, tuple[int, object]]:
        """After a round, by name of the slot, and then of what it is in: the id of the owner, and the key."""
        self._round()
        places, found = Snapshot(self._roots).places, {}
        while name:
            if name in places:
                found[name] = (id(places[name][0]), places[name][1])
            name = _LAST_PART.sub("", name)
        return found

    def line_of_process(self, name: str) -> str | None:
        before = process_state()[name]
        return self._traced(lambda: process_state()[name] != before)

    def line_of_seed(self) -> str | None:
        return self._traced(lambda: self._recording is not None and self._recording.is_seeded())

    def _traced(self, is_found: Callable[[], bool], done: "_Round | None" = None) -> str | None:
        """The user's line, of one round, after which `is_found` is true."""
        last: tuple[str, int] | None = None
        found: list[str | None] = []

        def look(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal last
            if is_library_file(frame.f_code.co_filename):
                return None
            if not found and is_found():
                found.append(None if last is None else line_of(*last))
            if last is None or "-packages" not in frame.f_code.co_filename or "-packages" in last[0]:
                last = frame.f_code.co_filename, frame.f_lineno
            return look

        sys.settrace(look)
        try:
            self._round()
        finally:
            sys.settrace(None)
        return found[0] if found else None

    def _refused(self, obstacle: Obstacle, where: str | None) -> CaptureError:
        return all_findings([Finding(obstacle, where or "")], self._steps[0].training)
