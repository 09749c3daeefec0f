"""AP06: weights that the app uses on the host while the device has trained on.

`session.run` trains on the device alone, and the model keeps the weights of the last `to_cpu`: a checkpoint of them, or
what the model predicts on the host, would be of an earlier time, and of the very first if the app never fetches any.
"""

import weakref
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

from sambasim.samba import context
from sambasim.samba.checks.findings import Finding
from sambasim.samba.checks.place import app_line, own_line_of_app
from sambasim.samba.checks.telling import telling
from sambasim.samba.machine import Machine

_loaded: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[Unfetched]]" = weakref.WeakKeyDictionary()
"""Who is told that a model is read. All that the model gets is a hook, a function, which can be copied and pickled."""


class Unfetched:
    """How far the device is ahead of the host, for one loaded PEF."""

    def __init__(self, machine: Machine, host_is_as_exchanged: Callable[[], bool]) -> None:
        """`host_is_as_exchanged` says whether the weights of the host are still those that both had."""
        self._machine = machine
        self._host_is_as_exchanged = host_is_as_exchanged
        self._steps_at_exchange = 0
        self._host_has_its_own = False
        self._told: set[str] = set()
        _loaded[machine.model] = weakref.ref(self)
        _watch()
        weakref.finalize(self, machine.model.register_forward_pre_hook(_note_forward).remove)

    def note_exchange(self) -> None:
        """Host and device have the same weights now."""
        self._steps_at_exchange = self._machine.replica.steps
        self._host_has_its_own = False

    def note_loaded(self) -> None:
        """The app has given the model other weights: the best of an earlier time, say."""
        self._host_has_its_own = True

    def note_read(self, how: str) -> None:
        """The app uses the weights of the model; `how` is a verb."""
        ahead = self._machine.replica.steps - self._steps_at_exchange
        if ahead <= 0 or how in self._told or self._host_has_its_own or not context.current().trains:
            return
        if self._host_is_as_exchanged():
            self._told.add(how)
            steps = "1 step" if ahead == 1 else f"{ahead} steps"
            what = f"the app {how} the weights on the host, and the device has trained on for {steps} since"
            telling.tell(Finding("AP06", what, app_line(), "samba.session.to_cpu(model) before it"))


@cache
def _watch() -> None:
    """Be told of what is read from now on, once in a process."""
    # Apps call the methods of torch's class.
    nn.Module.state_dict = _watched(nn.Module.state_dict)  # type: ignore[method-assign]  # mypy knows no method that is watched
    nn.Module.load_state_dict = _noting(nn.Module.load_state_dict)  # type: ignore[method-assign]  # as above


def _note_forward(module: nn.Module, _: object) -> None:
    """A hook of the model: a function of this module, and not of an object, so that the model can be pickled."""
    if torch.compiler.is_compiling() or (module.training and torch.is_grad_enabled()):
        return  # traced, or about to be trained on the host beside the device
    reference = _loaded.get(module)
    unfetched = None if reference is None else reference()
    if unfetched is not None and own_line_of_app() is not None:
        unfetched.note_read("computes with")


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_state_dict(module: nn.Module, *args: Any, **keywords: Any) -> Any:
        reference = _loaded.get(module)
        unfetched = None if reference is None else reference()
        if unfetched is not None:
            unfetched.note_loaded()
        return original(module, *args, **keywords)

    return load_state_dict


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def state_dict(module: nn.Module, *args: Any, **keywords: Any) -> Any:
        reference = _loaded.get(module)
        unfetched = None if reference is None else reference()
        # A tracer, ours or torch's, reads with a prefix, or wants the very tensors.
        if unfetched is not None and not args and not keywords.get("prefix") and not keywords.get("keep_vars"):
            unfetched.note_read("reads")
        return original(module, *args, **keywords)

    return state_dict
