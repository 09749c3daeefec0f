"""What a real call of a step changes in Python, beside its tensors, and whether later calls depend on it. A graph loses
all of that: so either nothing reads it, which is a notice, or the step is refused with the slot and its line."""

import contextlib
import itertools
import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module as of_modules

from sambasim.compiler.capture import explain
from sambasim.compiler.capture.as_eager import kernels_of_eager
from sambasim.compiler.capture.asked_values import Asked, modes_reach_inside
from sambasim.compiler.capture.explain import Obstacle, Occurrence, all_occurrences, changed_constants, obstacles
from sambasim.compiler.capture.recording import Op, Recording, changing_line, digest_of, role_of
from sambasim.compiler.capture.slots import FEW, MISSING, NUMBERS, Slot, fill, perturbed, vary
from sambasim.compiler.capture.snapshot import Snapshot
from sambasim.compiler.capture.step import EvaluationStep, TrainingStep, eagerly, loss_in
from sambasim.compiler.capture.tensors import check_loss
from sambasim.compiler.capture.trial import PLAIN, Told, copying_data, quiet, watched, with_values
from sambasim.data.user_code import generators_kept
from sambasim.errors import CaptureError, InternalError
from sambasim.forks import Fork

_MOST_BYTES = 80_000_000
"""Where a call makes more bytes of tensors, it is repeated only if it has changed something."""

_MOST_PARAMETERS = 20_000_000  # A model that has more is captured before it is observed

_MOST_ALONE = 8  # so many changed slots are varied one by one

_OF_PYTHON, _OF_NUMPY = "random numbers of Python", "random numbers of NumPy"
_OF_OPTIMIZERS = ".param_groups["

_STRIDES = (4096, 256, 16, 1)
"""After how many events of Python's trace each search for a line looks, from where the last one has seen no change."""


Observed: TypeAlias = tuple[Mapping[nn.Module, Asked], tuple[str, ...]]
"""What the first call of each step was and asks of values; notices of slots that calls change and nothing reads, and of
what calls do outside."""

_Round: TypeAlias = list[Asked]  # of one call of each step


def _ops(done: Iterable[Asked]) -> list[Op]:
    return [op for call in done for op in call.recording.ops]


def _texts(done: _Round) -> list[str]:
    return [op.text for op in _ops(done)]


def _writes(done: _Round) -> list[tuple[str, ...]]:
    """Labels of the tensors that existed before and are changed."""
    return [op.writes for op in _ops(done) if op.writes]


def _is_large(done: _Round) -> bool:
    return sum(call.recording.made_bytes for call in done) > _MOST_BYTES


def _carries(fork: Fork[Any] | None) -> bool:
    """Whether a call, in the process of `fork`, depends on what other values one before it had."""
    return fork is not None and fork.ask(("carried", True)) not in (None, fork.ask(("carried", False)))


class NotSound(CaptureError):
    """A large model was captured before it was observed, and has to be. This process is no longer as it was."""


def observed_beside(observer: "Observer") -> Fork[Told | None] | None:
    """A copy of this process that calls the steps on fake tensors, and ends with what the calls do outside of Python,
    None if they affect later ones. For a small model, and in a last try: None."""
    if not Observer.may_begin_again or observer.is_fake or observer.parameters <= _MOST_PARAMETERS:
        return None
    fork: Fork[Told | None] = observer.fork()
    fork.begin(("effects_on_fakes",))
    return fork


class Observer:
    """Calls each of `steps`, which have one model. `loss`: the name of the loss."""

    may_begin_again = False
    """Whether NotSound may be raised in this process: another one will then observe the model first."""

    def __init__(self, steps: Sequence[nn.Module], inputs: Sequence[Tensor], loss: str | None = None) -> None:
        self._steps, self._inputs, self._loss = steps, inputs, loss
        given = getattr(steps[0], "loss", None)
        self._roots = {
            "model": steps[0].get_submodule("model"),
            "loss": getattr(given, "of_user", given),
            "hooks of all modules": [vars(of_modules)[name] for name in vars(of_modules) if "_global_" in name],
            _OF_PYTHON: vars(random)["_inst"],
            _OF_NUMPY: vars(np.random.mtrand)["_rand"],
        }
        self.parameters = sum(parameter.numel() for parameter in steps[0].parameters())
        self.is_fake = any(isinstance(one, FakeTensor) for one in (*inputs, *steps[0].parameters()))
        held = (*steps[0].named_parameters(), *steps[0].named_buffers())
        self._named: dict[str, Tensor] = {f"{role_of(tensor)} {name}": tensor for name, tensor in held}
        self._before: Snapshot | None = None
        self._modes = [(module, module.training) for module in steps[0].modules()]
        self._fresh: Fork[Any] | None = None
        self.changed: Sequence[Slot] = ()
        self.first_changed: Sequence[Slot] = ()
        self._rates: Sequence[Slot] = ()
        self.repeats = True  # the second round has the operators of the first
        self._recording: Recording | None = None
        self._has_seeded = False
        self.outside: Told = {}

    def run(self) -> Observed:
        """Round 1 shows what a call changes. Round 2, with another seed, shows what it changes again. If neither
        changes anything, both must have the same operators. What round 1 alone changes is a cache: it must not depend
        on the inputs, and a third round must have the results of the first. What round 2 changes too is a counter or
        the like, which no call may read. Of a large model, or on fake tensors, round 1 is enough if it changes nothing.

        Caches are filled afterwards, and tensors have their values again. Raises CaptureError for state that a graph
        would lose, and ModelError if PyTorch cannot run a step."""
        with contextlib.ExitStack() as stack:
            if self.is_fake:  # as in a capture
                stack.enter_context(kernels_of_eager())
            else:
                self._fresh = stack.enter_context(contextlib.closing(self.fork()))
            stack.enter_context(generators_kept())
            stack.callback(self._set_modes, self._steps[0])
            before = Snapshot(self._roots)
            self._before, self._named = before, before.labelled() | self._named
            first, changed, after = self._observed_round(before, 1)
            for asked in first:
                asked.names = after.names_of_tensors()
                asked.changed = {label for labels in _writes(first) for label in labels}
            self.changed = self.first_changed = changed
            self._check_slots(changed)
            self._check_calls(first)
            if not changed and (self.is_fake or _is_large(first)):
                return self._observed(first)
            second, again, after = self._observed_round(after, 2)
            self.changed, self.repeats = again, _texts(first) == _texts(second)
            self._check_slots([slot for slot in again if _OF_OPTIMIZERS in slot.name])
            values = [slot for slot in after.slots.values() if slot.kind == "value" and isinstance(slot.owner, dict)]
            self._rates = [slot for slot in values if _OF_OPTIMIZERS in slot.name]
            if not changed and not again:
                self._check_equal(first, second)
                return self._observed(first)
            names = [slot.name for slot in again]
            only_first = [slot for slot in changed if not any(name.startswith(slot.name) for name in names)]
            if only_first and (_writes(first) != _writes(second) or _carries(self._fresh)):
                slot = next((slot for slot in only_first if slot.kind == "tensor"), only_first[0])
                what = "which the first call sets, and which depends on that call's inputs, weights or draws"
                raise self._lost(slot, what, explain.FIRST_CALL)
            if again:
                self._check_read(second)
            elif not self.is_fake and [call.result for call in first] != [call.result for call in self._round()]:
                what = "which the first call sets, and which changes its result"
                raise self._lost(only_first[0], what, explain.COUNTED)
            self.call(self._steps[0])  # so that it is not what an evaluation leaves behind
            return self._observed(first, again)

    def fork(self) -> Fork[Any]:
        """A copy of this process as it is now, which calls a method for each request: its name and arguments."""
        one_thread = partial(torch.set_num_threads, 1)  # the other threads of OpenMP are not in a copy
        return Fork(lambda request: getattr(self, request[0])(*request[1:]), one_thread)

    def effects_on_fakes(self) -> Told | None:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes: dict[int, Tensor] = {}
        for module in self._steps[0].modules():
            for held in (vars(module)["_parameters"], vars(module)["_buffers"]):
                tensors = {name: tensor for name, tensor in held.items() if tensor is not None}
                held |= {name: fakes.setdefault(id(one), mode.from_tensor(one)) for name, one in tensors.items()}
        with mode:
            observer = Observer(self._steps, [mode.from_tensor(tensor) for tensor in self._inputs], self._loss)
            asks = any(op.asks or op.foreign for op in _ops(observer.run()[0].values()))
        has_state = observer.changed or any(slot.kind != "value" for slot in observer.first_changed)
        return None if asks or has_state or not observer.repeats else observer.outside

    def _observed(self, first: _Round, kept: Sequence[Slot] = ()) -> Observed:
        names = dict.fromkeys(slot.name for slot in kept if slot.name not in (_OF_PYTHON, _OF_NUMPY))
        notices = explain.notices({explain.FOREIGN: self._foreign(first), explain.KEPT: names, **self.outside})
        return dict(zip(self._steps, first, strict=True)), notices

    def _foreign(self, first: _Round) -> Collection[str]:
        """What is none of the model's, though it could be trained, with the line that first reads it."""
        assert self._before is not None
        model, lines = self._steps[0].get_submodule("model"), dict[str, str]()
        for label, line in ((label, op.line) for op in _ops(first) if op.line for label in op.foreign):
            lines.setdefault(self._before.holder_of(label, model), f"{Path(line.file).name}:{line.number}")
        return [f"{holder} ({line})" for holder, line in lines.items()]

    def _round(self, seed: int = 1) -> _Round:
        return [self.call(step, seed) for step in self._steps]

    def _observed_round(self, before: Snapshot, seed: int) -> tuple[_Round, list[Slot], Snapshot]:
        """A round, what its calls change, though the next may change it back, and what there is afterwards."""
        done, changed = [], dict[tuple[str, str], Slot]()
        for step in self._steps:
            done.append(self.call(step, seed))
            after = Snapshot(self._roots)
            changed = {(slot.name, slot.kind): slot for slot in before.changed_in(after)} | changed
            before = after
        return done, [*changed.values()], before

    def _set_modes(self, step: nn.Module) -> None:
        if isinstance(step, EvaluationStep):
            step.eval()
        else:
            step.get_submodule("model").train()  # a model's own method may do more
            for module, is_training in self._modes:
                module.training = is_training

    def call(self, step: nn.Module, seed: int | None = None) -> Asked:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
        given = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in self._inputs]
        named = self._named | {f"input {index}": one for index, one in enumerate(given)}
        recording = self._recording = Recording(named)
        asked = Asked(recording)
        self._set_modes(step)
        try:
            data = with_values([copying_data(recording.is_kept)])
            with eagerly(step, given), quiet(), watched(self.outside), modes_reach_inside(), data, recording, asked:
                outputs = step(*given)
            if isinstance(step, TrainingStep):
                any_shape, lacks_labels = step.losses is not None, step.lacks_labels
                check_loss(loss_in(outputs), self._loss, any_shape=any_shape, lacks_labels=lacks_labels)
                leaves = [one for one in self._named.values() if one.requires_grad and one.is_leaf]
                held = {id(one): one for one in (*leaves, *recording.foreign.values())}.values()
                gradients = [(leaf, "grad", None) for leaf in held]  # they have theirs again
                with eagerly(step, given), quiet(), with_values(gradients), recording:
                    torch.autograd.backward(loss_in(outputs).sum())
            recording.check_generator()
            asked.result = next(map(digest_of, () if self.is_fake else outputs), "")
        finally:
            recording.undo()
            self._has_seeded |= recording.seeded
        return asked

    def carried(self, others: bool) -> list[str]:
        """The operators of each step's call after a call of each, with other inputs, weights and seeds if `others`."""
        held = {id(one): one for one in (*self._inputs, *self._steps[0].parameters(), *self._steps[0].buffers())}
        own, texts = [one.detach().clone() for one in held.values()], list[str]()
        for before, after in itertools.product(self._steps, repeat=2):
            for count in (len(own), 0) if others else (0,):  # values may be checked: then as they were
                fill(held.values(), [*map(perturbed, own[:count]), *own[count:]], 77 if others else 1)
                with contextlib.suppress(Exception):
                    self.call(before)
                    break
            fill(held.values(), own, 1)
            texts += _texts([self.call(after)])
        return texts

    def _check_calls(self, first: _Round) -> None:
        for call in (asked.recording for asked in first):
            if own := next((op for op in call.ops if op.draws_from), None):
                is_kept = any(isinstance(slot.owner, torch.Generator) for slot in Snapshot(self._roots).slots.values())
                raise self._refused(explain.GENERATOR if is_kept else explain.MADE, str(own.line or ""))
            if occurrences := changed_constants(call):
                if slot := next((slot for slot in self._of_loss() if call.has_changed(slot.value)), None):
                    rewrite = f"{explain.INTO_MODEL} register it: self.register_buffer(name, tensor)"
                    obstacle = Obstacle(f"{slot.name}, which each call changes", rewrite)
                    raise self._refused(obstacle, occurrences[0].where)
                raise all_occurrences(occurrences, self._steps[0].training)
            if call.seeded:
                raise self._refused(explain.SEEDED, self._line_of("", "seed"))

    def _check_slots(self, changed: Sequence[Slot]) -> None:
        for slot in changed:
            is_trained = isinstance(slot.value, nn.Parameter) and slot.value.requires_grad
            if slot.kind == "process":
                raise self._lost(slot, "which is of the process, and which forward() changes", "set it outside")
            if _OF_OPTIMIZERS in slot.name:
                raise self._lost(slot, "of an optimizer, which forward() changes", explain.RATES)
            if slot.before is MISSING and is_trained:
                what = "a parameter that forward() makes, and that an optimizer made before does not have"
                raise self._lost(slot, what, "make it in __init__")
            if isinstance(slot.owner, np.ndarray) and (label := self._in_memory_of(slot.owner)):
                what = f"the memory of the {label} as an array of NumPy, which forward() changes"
                raise self._lost(slot, what, "change the tensor by PyTorch: self.n.add_(1)")
            if slot.is_registered and isinstance(slot.before, Tensor) and not hasattr(slot.before, PLAIN):
                name = slot.name.removeprefix("model.")
                kind = "parameter" if isinstance(slot.value, nn.Parameter) else "buffer"
                what = f"the {kind} {name}, which forward() replaces, where a graph changes tensors in place"
                rewrite = f"copy into it: self.{name.rpartition('.')[2]}.copy_(…)"
                if is_trained:
                    rewrite = "compute with a changed copy, which trains other numbers: w = F.normalize(self.a.weight)"
                raise self._refused(Obstacle(what, rewrite), self._line_of(slot.name, slot.kind))

    def _in_memory_of(self, array: np.ndarray[Any, Any]) -> str | None:
        named = {} if self.is_fake else self._named
        inside = (key for key, one in named.items() if 0 <= array.ctypes.data - one.data_ptr() < one.nbytes)
        return next((key.removeprefix("foreign ").replace(" model.", " ") for key in inside), None)

    def _check_equal(self, first: _Round, second: _Round) -> None:
        if _texts(first) != _texts(second):
            if found := dict.fromkeys(occurrence for call in first for occurrence in obstacles(call.recording)):
                raise all_occurrences([*found], self._steps[0].training)
            pairs = zip(_ops(first), _ops(second), strict=False)
            line = next((now.line for before, now in pairs if before.text != now.text), None)
            raise self._refused(explain.DIFFERS, str(line or ""))

    def _check_read(self, last: _Round) -> None:
        """Raises CaptureError for a slot that each call changes, and on which the operators of a call may depend."""
        is_read = _texts(self._round(3)) != _texts(last)
        index: int | None = -1
        if not self.is_fake:
            with contextlib.closing(self.fork()) as fork:
                index = fork.ask(("first_read", FEW if is_read or _is_large(last) else range(len(NUMBERS))))
                is_read |= _carries(fork)
        if is_read or index != -1:
            if index in (None, -1):
                index = next((at for at, slot in enumerate(self.changed) if slot.kind == "tensor"), 0)
            slot = self.changed[index or 0]
            kind = "tensor" if isinstance(slot.owner, np.ndarray) else slot.kind
            rewrite = explain.REWRITES["gradient" if slot.key == "requires_grad" else kind]
            raise self._lost(slot, "which each call changes, and on which later calls depend", rewrite)

    def first_read(self, trials: Sequence[int]) -> int:
        """The index of the first changed slot without which a call is another; -1 if no variation changes a call."""
        is_few = len(self.changed) <= _MOST_ALONE
        expected = self._varied((), 0)
        for index, varied in enumerate([(slot,) for slot in self.changed] if is_few else [self.changed]):
            if any(expected is None or self._varied(varied, number) != expected for number in trials):
                return index
        return -1

    def _varied(self, varied: Sequence[Slot], number: int) -> list[str] | None:
        """The operators of a round that finds other values in `varied`, and in no other slot; None if it fails."""
        try:
            for slot in (*self.changed, *self._rates):
                if slot.kind in ("value", "tensor"):
                    slot.set(slot.value)
            for slot in varied:
                vary(slot, number)
            return [*_texts(self._round()), *(str(slot.owner[slot.key]) for slot in self._rates)]
        except InternalError:
            raise
        except Exception:
            return None

    def _line_of(self, name: str, kind: str, *, is_new: bool = True) -> str | None:
        """The user's line, of the first rounds, that changes a slot, or makes it if `is_new`, or the "seed"."""
        seen: tuple[int, str | None] = 0, None
        if self._fresh is not None:
            for stride in _STRIDES:
                seen = self._fresh.ask(("changing_line", name, kind, is_new, seen[0], stride)) or seen
        return seen[1]

    def changing_line(self, name: str, kind: str, is_new: bool, begin: int, stride: int) -> tuple[int, str | None]:
        mark = partial(self._mark_of, name, kind)
        if not is_new and mark() is None:
            self._round()
        return changing_line(self._round, mark, begin, stride)

    def _mark_of(self, name: str, kind: str) -> object:
        if kind == "seed":
            return self._has_seeded or (self._recording is not None and self._recording.is_seeded())
        slot = Snapshot(self._roots).slots.get((name, kind, 0))
        return slot and slot.mark

    def _of_loss(self) -> list[Slot]:
        """The slots that only the loss reaches."""
        own, others = (Snapshot({name: self._roots[name]}).slots.values() for name in ("loss", "model"))
        of_model = {(id(slot.owner), str(slot.key)) for slot in others}
        return [slot for slot in own if (id(slot.owner), str(slot.key)) not in of_model]

    def _lost(self, slot: Slot, what: str, rewrite: str) -> CaptureError:
        if any(one.owner is slot.owner and one.key == slot.key for one in self._of_loss()):
            rewrite = f"{explain.INTO_MODEL} {rewrite}"
        line = self._line_of(slot.name, slot.kind, is_new=slot.before is MISSING)
        return self._refused(Obstacle(f"{slot.name}, {what}", rewrite), line)

    def _refused(self, obstacle: Obstacle, where: str | None) -> CaptureError:
        return all_occurrences([Occurrence(obstacle, where or "")], self._steps[0].training)
