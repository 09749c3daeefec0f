"""AP06: weights that the app uses on the host while the device has trained on.

`session.run` trains on the device alone, and the model keeps the weights of the last `to_cpu`: a checkpoint of them, or
what the model predicts on the host, would be of an earlier time, and of the very first if the app never fetches any.

    seen        `model.state_dict()`; `torch.save` of the model, or of what holds it; calls of the model and of any
                module in it, and so `model.forward(x)` of a model that calls others
    not seen    `model.forward(x)` of a model without modules; a parameter that is read itself, as in
                `model.fc.weight.numpy()`; pickle and deepcopy; a state_dict of a module in the model; what
                `torch.jit.script`, `torch.compile` and `torch.export` have made of it; a model that trains on the host

What is not seen could be seen by watching every attribute of every module of the process, which tracers look at too.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache, wraps
from typing import Any

import torch
from torch import nn, serialization
from torch.jit import _recursive

from sambasim.samba import context
from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.place import app_line, is_called_by_app
from sambasim.samba.checks.telling import telling
from sambasim.samba.machine import Machine

_SAVES = ("_save", "_legacy_save")
"""What `torch.save` calls by the name that its module has for it, however the app has imported it."""

_SCRIPTS = "create_script_module"
"""What `torch.jit.script` calls likewise."""

_loaded: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Unfetched]]" = weakref.WeakKeyDictionary()
"""Who is told that a module is read, of each in a model. All that they get is a hook, a function, which can be copied
and pickled. (A hook of all modules of the process is one that torch.export refuses.)"""


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
        for module in machine.model.modules():
            _loaded[module] = weakref.ref(self)
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
        steps = self._machine.replica.steps
        ahead = steps - self._steps_at_exchange
        if ahead <= 0 or how in self._told or self._looked.get(how) == steps or self._host_has_its_own:
            return
        if not context.current().trains or not is_called_by_app():
            return
        self._looked[how] = steps
        if self._host_is_as_exchanged():
            self._told.add(how)
            counted = "1 step" if ahead == 1 else f"{ahead} steps"
            what = f"the app {how} the weights on the host, and the device has trained on for {counted} since"
            telling.tell(Finding("AP06", what, app_line(), "samba.session.to_cpu(model) before it"))


@cache
def _watch() -> None:
    """Be told of what is read from now on, once in a process."""
    # Apps call the methods of torch's class.
    nn.Module.state_dict = _watched(nn.Module.state_dict)  # type: ignore[method-assign]  # mypy knows no method that is watched
    nn.Module.load_state_dict = _noting(nn.Module.load_state_dict)  # type: ignore[method-assign]  # as above
    for module, name, watched in (*((serialization, one, _saving) for one in _SAVES), (_recursive, _SCRIPTS, _bare)):
        original = getattr(module, name, None)
        if original is not None:
            setattr(module, name, watched(original))


def _who(module: nn.Module) -> Unfetched | None:
    reference = _loaded.get(module)
    return None if reference is None else reference()


def _note_forward(module: nn.Module, _: object) -> None:
    """A hook of each module: a function of this file, and not of an object, so that the model can be pickled."""
    if torch.compiler.is_compiling():
        return  # traced; and a tracer must not come by what follows
    unfetched = _who(module)
    if unfetched is not None and not (unfetched.model.training and torch.is_grad_enabled()):
        unfetched.note_read("computes with")  # else it is about to be trained on the host beside the device


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_state_dict(module: nn.Module, *args: Any, **keywords: Any) -> Any:
        unfetched = _who(module)
        if unfetched is not None and unfetched.model is module:
            unfetched.note_loaded()
        return original(module, *args, **keywords)

    return load_state_dict


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def state_dict(module: nn.Module, *args: Any, **keywords: Any) -> Any:
        unfetched = _who(module)
        # A tracer, ours or torch's, reads with a prefix, or wants the very tensors.
        of_app = not args and not keywords.get("prefix") and not keywords.get("keep_vars")
        if unfetched is not None and unfetched.model is module and of_app:
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
