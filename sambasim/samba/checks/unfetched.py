"""AP06 and AP07: weights that host and device do not exchange.

`session.run` trains on the device alone, and the model keeps the weights of the last `to_cpu`. A checkpoint of them, or
a prediction on the host, is out of date (AP06). And an app may train nothing at all on the device (AP07).

    watched       `model.state_dict()`; `torch.save` of the model or of something that holds it; calls of the model and
                  of its modules
    not watched   `model.forward(x)` of a model without modules; reads of a parameter; pickle and deepcopy; state_dict
                  of a module in the model; what `torch.jit`, `torch.compile`, `torch.export` and `torch.func` make

A call in training mode with gradients is not reported: a training step on the host may begin.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
from torch import nn, serialization
from torch.jit import _recursive
from torch.utils.weak import WeakIdKeyDictionary

from sambasim.compiler.capture.tensors import held_by
from sambasim.compiler.capture.trial import is_tracing
from sambasim.ir.graph import SectionKind
from sambasim.ir.types import SymbolKind
from sambasim.samba import context
from sambasim.samba.checks.findings import Finding, app_line, is_called_by_app, reporter
from sambasim.samba.checks.unsent import Unsent
from sambasim.samba.machine import Machine
from sambasim.units import counted

_MOST_ACCUMULATED = 256
"""No app accumulates the gradients of so many batches before its first optimizer step."""

_loaded: "MutableMapping[nn.Module, weakref.ref[Unfetched]]" = WeakIdKeyDictionary()
"""The `Unfetched` of each module that the device changes. The module itself gets a hook and nothing else."""


class Unfetched:
    """What the device has trained since the last exchange, for one loaded PEF."""

    def __init__(self, machine: Machine, unsent: Unsent) -> None:
        self.model = machine.model
        self._machine = machine
        self._unsent = unsent
        self._steps_at_exchange = self._backwards = 0
        self.app_has_loaded = False  # other weights into the model, for example the best ones of an earlier time
        self._reported: set[str] = set()
        self._compared: dict[str, int] = {}  # by use, the last step in which weights were compared: it takes time
        changed = list(_changed_by(machine))
        # With hooks, torch leaves its fast path for these layers.
        fast = {id(part) for one in changed if isinstance(one, nn.TransformerEncoderLayer) for part in one.modules()}
        for module in changed:
            _loaded[module] = weakref.ref(self)
            if id(module) not in fast:
                weakref.finalize(self, module.register_forward_pre_hook(_note_forward).remove)
        _watch()

    def note_exchange(self) -> None:
        """Host and device have the same weights now."""
        self._steps_at_exchange = self._machine.replica.steps
        self.app_has_loaded = False

    def note_run(self, kinds: Collection[SectionKind]) -> None:
        """Sections of `kinds` are about to run."""
        self._backwards += SectionKind.BCKWD in kinds
        if SectionKind.OPT in kinds:
            self._backwards = 0
        elif self._backwards == _MOST_ACCUMULATED and not self._machine.replica.steps:
            self._report_backwards()

    def note_fetch(self) -> None:
        """The weights of the device are about to replace those of the host."""
        if self._backwards and not self._machine.replica.steps:
            self._report_backwards()
        elif self._unsent.host_trains and self._ahead == 0:
            self._report_untrained(
                "to_cpu overwrites weights that the app has trained on the host, and the device has trained none",
                "session.run(…) in place of forward, backward() and optimizer.step(); or leave to_cpu out",
            )

    def note_replacement(self) -> None:
        """`trace_graph` is about to load another PEF for the same model, with the weights of the host."""
        if self._ahead > 0 and context.current().trains:
            self._report("trace_graph loads the weights of", "before trace_graph")

    def note_read(self, use: str) -> None:
        """The weights of the model are used on the host; `use` is a verb."""
        if self._is_behind(use):
            self._reported.add(use)
            self._report(f"the app {use} the weights on", "before it")

    @property
    def _ahead(self) -> int:
        return self._machine.replica.steps - self._steps_at_exchange

    def _is_behind(self, use: str) -> bool:
        """Whether the app uses out-of-date weights. Compares weights once a step for each kind of use, and never while
        torch transforms the model, because the comparison would become part of the result."""
        steps = self._machine.replica.steps
        if self._ahead <= 0 or use in self._reported or self._compared.get(use) == steps or self.app_has_loaded:
            return False
        is_transforming = (
            torch.jit.is_tracing()  # type: ignore[no-untyped-call]  # torch gives it no types
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch._C._len_torch_dispatch_stack() > 0
        )
        if is_transforming or not context.current().trains or not is_called_by_app():
            return False
        self._compared[use] = steps
        return self._unsent.host_is_as_exchanged()

    def _report(self, use: str, when: str) -> None:
        what = f"{use} the host, and the device has trained for {counted(self._ahead, 'step')} since"
        reporter.report(Finding("AP06", what, app_line(), f"samba.session.to_cpu(model) {when}"))

    def _report_backwards(self) -> None:
        self._report_untrained(
            f"the device has run {counted(self._backwards, 'backward')} and no optimizer step, so nothing is trained",
            'add "OPT" to section_types, or leave section_types out: an optimizer.step() on the host has no effect',
        )

    def _report_untrained(self, what: str, remedy: str) -> None:
        if context.current().trains and "AP07" not in self._reported:
            self._reported.add("AP07")
            reporter.report(Finding("AP07", what, app_line(), remedy))


def _changed_by(machine: Machine) -> Iterator[nn.Module]:
    """The modules that hold, directly or below, a parameter that the device trains or a buffer that it changes."""
    program = machine.program
    changed = {member.parameter for group in program.groups for member in group.members}
    if program.training is not None:
        outputs = {output.symbol for output in program.training.outputs}
        changed |= {name for name in outputs if program.symbols[name].kind is SymbolKind.BUFFER}
    names = {name for symbol in changed for name in program.symbols[symbol].torch_names}
    tensors = {id(one.tensor) for one in held_by(machine.model) if not names.isdisjoint(one.names)}
    for module in machine.model.modules():
        if any(id(one) in tensors for one in (*module.parameters(), *module.buffers())):
            yield module


@cache
def _watch() -> None:
    """Watch from now on. Apps call methods of torch's class, so these are replaced."""
    nn.Module.state_dict = _watched_state_dict(nn.Module.state_dict)  # type: ignore[method-assign]  # replaced on purpose
    nn.Module.load_state_dict = _watched_load(nn.Module.load_state_dict)  # type: ignore[method-assign]  # replaced on purpose
    # `torch.save` and `torch.jit.script` call these by their names in the module, however the app imports them.
    for module, name in (
        (serialization, "_save"),
        (serialization, "_legacy_save"),
        (_recursive, "create_script_module"),
    ):
        setattr(module, name, _without_hooks(getattr(module, name), saves=module is serialization))


def _of(modules: Iterable[nn.Module]) -> set[Unfetched]:
    return {one for module in modules if module in _loaded and (one := _loaded[module]()) is not None}


def _note_forward(module: nn.Module, _: object) -> None:
    """The hook of each module: a function, so that the model can be copied and pickled."""
    if is_tracing():
        return
    for unfetched in _of([module]):
        if not (unfetched.model.training and torch.is_grad_enabled()):
            unfetched.note_read("computes with")


def _watched_load(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_state_dict(module: nn.Module, *args: Any, **keywords: Any) -> Any:
        result = original(module, *args, **keywords)
        for unfetched in _of([module]):
            unfetched.app_has_loaded |= unfetched.model is module
        return result

    return load_state_dict


def _watched_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def state_dict(module: nn.Module, *args: Any, **keywords: Any) -> Any:
        # Tracers read with a prefix, or keep the variables.
        of_app = not args and not keywords.get("prefix") and not keywords.get("keep_vars")
        for unfetched in _of([module]):
            if of_app and unfetched.model is module:
                unfetched.note_read("reads")
        return original(module, *args, **keywords)

    return state_dict


def _without_hooks(original: Callable[..., Any], *, saves: bool) -> Callable[..., Any]:
    """`original`, for modules without our hooks: TorchScript would compile them, and a file would need sambasim."""

    @wraps(original)
    def call(owner: object, *args: Any, **keywords: Any) -> Any:
        # A module, or a checkpoint that holds modules beside other things.
        parts = owner.values() if isinstance(owner, Mapping) else owner if isinstance(owner, list | tuple) else [owner]
        modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
        for unfetched in _of(modules if saves else []):
            unfetched.note_read("saves")
        with _hidden_hooks(modules):
            return original(owner, *args, **keywords)

    return call


@contextmanager
def _hidden_hooks(modules: Iterable[nn.Module]) -> Iterator[None]:
    hooks = [
        (one._forward_pre_hooks, number)
        for one in {id(module): module for module in modules}.values()
        for number, hook in one._forward_pre_hooks.items()
        if hook is _note_forward
    ]
    for of_module, number in hooks:
        of_module.pop(number, None)  # a shallow copy shares the hooks
    try:
        yield
    finally:
        for of_module, number in hooks:
            of_module[number] = _note_forward
