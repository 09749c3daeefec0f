"""AP06: weights that the app uses on the host while the device has trained on.

`session.run` trains on the device alone, and the model keeps the weights of the last `to_cpu`: a checkpoint of them, or
what the model predicts on the host, would be of an earlier time, and of the very first if the app never fetches any.

    seen        `model.state_dict()`; `torch.save` of the model, or of what holds it; calls of the model and of any
                module in it, and so `model.forward(x)` of a model that calls others
    not seen    `model.forward(x)` of a model without modules; a parameter that is read itself, as in
                `model.fc.weight.numpy()`; pickle and deepcopy; a state_dict of a module in the model; what
                `torch.jit`, `torch.compile` and `torch.export` make of it; calls within `torch.func`; a layer of a
                TransformerEncoder alone; a model that trains on the host
    no finding  modules that the device leaves as they are: without parameters, or frozen

A call in training mode with gradients may be the beginning of a training step on the host: it is told later, if no
backward has followed. Not told is one right behind the first step: what it computes is the loss of that very step.

What is not seen could be seen by watching every attribute of every module of the process, which tracers look at too.
"""

import atexit
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from functools import cache, wraps
from itertools import accumulate
from typing import Any

import torch
from torch import nn, serialization
from torch.jit import _recursive
from torch.utils.weak import WeakIdKeyDictionary

from sambasim.ir.types import SymbolKind
from sambasim.samba import context
from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.place import app_line, is_called_by_app
from sambasim.samba.checks.telling import telling
from sambasim.samba.machine import Machine

_SAVES = ("_save", "_legacy_save")
"""What `torch.save` calls by the name that its module has for it, however the app has imported it."""

_SCRIPTS = "create_script_module"
"""What `torch.jit.script` calls likewise."""

_COMPUTES, _TRAINS = "computes with", "trains"

_HOOKS = "_forward_pre_hooks"
"""What a module has its hooks in."""

_loaded: "MutableMapping[nn.Module, weakref.ref[Unfetched]]" = WeakIdKeyDictionary()
"""Who is told that a module is read, of each in a model that the device changes. All that they get is a hook, which
their copies and pickles are without. (A hook of all modules of the process is one that torch.export refuses.)"""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the model in training mode, `ahead` steps behind the device; a backward may follow."""

    where: str | None
    ahead: int


class Unfetched:
    """How far the device is ahead of the host, for one loaded PEF."""

    def __init__(self, machine: Machine, host_is_as_exchanged: Callable[[], bool]) -> None:
        """`host_is_as_exchanged` says whether the weights of the host are still those that both had."""
        self._machine = machine
        self._host_is_as_exchanged = host_is_as_exchanged
        self._steps_at_exchange = 0
        self._host_has_its_own = False
        self._told: set[str] = set()
        self._looked: dict[str, int] = {}
        """Behind which step the weights were looked at, by verb: a model has many modules, and it takes time."""
        self._call: _Call | None = None
        """The first in training mode since host and device met that no backward has followed yet."""
        changed = list(_changed_by(machine))
        # Where there are hooks, torch leaves its fast path for these layers.
        fast = {id(part) for one in changed if isinstance(one, nn.TransformerEncoderLayer) for part in one.modules()}
        for module in changed:
            _loaded[module] = weakref.ref(self)
            if id(module) not in fast:
                weakref.finalize(self, module.register_forward_pre_hook(_note_forward).remove)
        _watch()

    @property
    def model(self) -> nn.Module:
        """The whole of what the PEF was made from."""
        return self._machine.model

    def note_exchange(self) -> None:
        """Host and device have the same weights now."""
        self._steps_at_exchange = self._machine.replica.steps
        self._host_has_its_own = False

    def note_loaded(self) -> None:
        """The app has given the model other weights: the best of an earlier time, say."""
        self._host_has_its_own = True

    def note_read(self, how: str) -> None:
        """The weights of the model are used, by the app or by sambasim; `how` is a verb."""
        if self._is_behind(how, how):
            self._tell(how, app_line(), self._ahead)

    def note_training(self) -> None:
        """The model is called as it is before a backward."""
        if self._call is not None or self._ahead <= 1 or self._looked.get(_TRAINS) == self._machine.replica.steps:
            return
        if not self._has_gradients() and self._is_behind(_COMPUTES, _TRAINS):
            self._call = _Call(app_line(), self._ahead)

    def settle(self) -> None:
        """Tell a call in training mode that no backward has followed: host and device are about to go on."""
        if self._call is None:
            return
        call, self._call = self._call, None
        if not self._has_gradients() and not self._host_has_its_own and self._host_is_as_exchanged():
            self._tell(_COMPUTES, call.where, call.ahead)

    @property
    def _ahead(self) -> int:
        return self._machine.replica.steps - self._steps_at_exchange

    def _has_gradients(self) -> bool:
        return any(parameter.grad is not None for parameter in self.model.parameters())

    def _is_behind(self, how: str, looking: str) -> bool:
        """Whether the app uses weights of an earlier time. They are looked at once a step, for each way of `looking`,
        and never where torch would take that for a part of what it transforms."""
        steps = self._machine.replica.steps
        if self._ahead <= 0 or how in self._told or self._looked.get(looking) == steps or self._host_has_its_own:
            return False
        if _is_transforming() or not context.current().trains or not is_called_by_app():
            return False
        self._looked[looking] = steps
        return self._host_is_as_exchanged()

    def _tell(self, how: str, where: str | None, ahead: int) -> None:
        if how not in self._told:
            self._told.add(how)
            counted = "1 step" if ahead == 1 else f"{ahead} steps"
            what = f"the app {how} the weights on the host, and the device has trained on for {counted} since"
            telling.tell(Finding("AP06", what, where, "samba.session.to_cpu(model) before it"))


def _changed_by(machine: Machine) -> Iterator[nn.Module]:
    """The modules of the model that hold, or have a module that holds, a parameter that the device trains, or a buffer
    that it changes."""
    program = machine.program
    changed = {member.parameter for group in program.groups for member in group.members}
    if program.training is not None:
        outputs = {output.symbol for output in program.training.outputs}
        changed |= {name for name in outputs if program.symbols[name].kind is SymbolKind.BUFFER}
    holders = {""} if changed else set()
    for path in (path for name in changed for path in program.symbols[name].torch_names):
        holders |= set(accumulate(path.split(".")[:-1], "{}.{}".format))
    named = machine.model.named_modules(remove_duplicate=False)
    yield from {id(module): module for path, module in named if path in holders}.values()


def _is_transforming() -> bool:
    """Whether torch traces, or transforms, what is computed now, or hands it to a mode of the app's."""
    return (
        torch.jit.is_tracing()  # type: ignore[no-untyped-call]  # torch gives it no types
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    )


@cache
def _watch() -> None:
    """Be told of what is read from now on, once in a process."""
    # Apps call the methods of torch's class.
    nn.Module.state_dict = _watched(nn.Module.state_dict)  # type: ignore[method-assign]  # replaced on purpose, to see the app's calls
    nn.Module.load_state_dict = _noting(nn.Module.load_state_dict)  # type: ignore[method-assign]  # replaced on purpose
    if "__reduce_ex__" not in vars(nn.Module):  # there it is that of the next class, which an app may have mixed in
        nn.Module.__reduce_ex__ = _reduce_ex  # type: ignore[method-assign, assignment]  # replaced on purpose
    for module, name, watched in (*((serialization, one, _saving) for one in _SAVES), (_recursive, _SCRIPTS, _bare)):
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, watched(original))
    atexit.register(_settle_all)


def _settle_all() -> None:
    for unfetched in {who for reference in list(_loaded.values()) if (who := reference()) is not None}:
        unfetched.settle()


def _who(module: nn.Module) -> Unfetched | None:
    reference = _loaded.get(module)
    return None if reference is None else reference()


def _note_forward(module: nn.Module, _: object) -> None:
    """A hook of each module: a function of this file, and not of an object, so that the model can be pickled."""
    if torch.compiler.is_compiling():
        return  # traced; and a tracer must not come by what follows
    unfetched = _who(module)
    if unfetched is None:
        return
    if unfetched.model.training and torch.is_grad_enabled():
        unfetched.note_training()
    else:
        unfetched.note_read(_COMPUTES)


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_state_dict(module: nn.Module, *args: Any, **keywords: Any) -> Any:
        result = original(module, *args, **keywords)
        unfetched = _who(module)
        if unfetched is not None and unfetched.model is module:
            unfetched.note_loaded()
        return result

    return load_state_dict


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def state_dict(module: nn.Module, *args: Any, **keywords: Any) -> Any:
        unfetched = _who(module)
        # A tracer, ours or torch's, reads with a prefix, or wants the very tensors.
        of_app = not args and not keywords.get("prefix") and not keywords.get("keep_vars")
        if unfetched is not None and unfetched.model is module and of_app:
            unfetched.settle()
            unfetched.note_read("reads")
        return original(module, *args, **keywords)

    return state_dict


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def save(saved: object, *args: Any, **keywords: Any) -> Any:
        for unfetched in {who for module in _modules_in(saved) if (who := _who(module)) is not None}:
            unfetched.note_read("saves")
        return original(saved, *args, **keywords)

    return save


def _reduce_ex(module: nn.Module, protocol: Any, /) -> Any:
    """Of what is pickled, or copied, and may be read where there is no sambasim."""
    reduced: Any = super(nn.Module, module).__reduce_ex__(protocol)
    if _who(module) is None or not isinstance(reduced, tuple) or len(reduced) < 3:
        return reduced
    make, arguments, state, *rest = reduced
    return (make, arguments, _without_hook(state), *rest)


def _without_hook(state: object) -> object:
    """Of a module, as pickle has it: its attributes, or these and its slots."""
    if isinstance(state, tuple):
        return tuple(map(_without_hook, state))
    hooks = state.get(_HOOKS) if isinstance(state, dict) else None
    if not isinstance(state, dict) or not isinstance(hooks, dict):
        return state
    others = OrderedDict((number, hook) for number, hook in hooks.items() if hook is not _note_forward)
    return state if len(others) == len(hooks) else {**state, _HOOKS: others}


def _modules_in(saved: object) -> Iterator[nn.Module]:
    """Those of a module, or of a checkpoint that has one beside other things."""
    parts = saved.values() if isinstance(saved, Mapping) else saved if isinstance(saved, list | tuple) else [saved]
    for part in parts:
        if isinstance(part, nn.Module):
            yield from part.modules()


def _bare(original: Callable[..., Any]) -> Callable[..., Any]:
    """Torch compiles hooks together with a module, and cannot compile ours: it gets modules without them."""

    @wraps(original)
    def create(module: nn.Module, *args: Any, **keywords: Any) -> Any:
        hidden = []
        for one in module.modules():
            hooks = one._forward_pre_hooks
            hidden += [(hooks, number) for number, hook in hooks.items() if hook is _note_forward]
        for hooks, number in hidden:
            del hooks[number]
        try:
            return original(module, *args, **keywords)
        finally:
            for hooks, number in hidden:
                hooks[number] = _note_forward

    return create
