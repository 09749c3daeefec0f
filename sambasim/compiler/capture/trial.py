"""Context managers around a capture or a trial call. Each restores all that it changes."""

import contextlib
import copy
import gc
import io
import logging
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Output, logs and warnings are dropped."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


@contextlib.contextmanager
def no_gradients_kept(step: nn.Module) -> Iterator[None]:
    """Parameters begin without gradients, and end with those that they have now."""
    kept = [(parameter, parameter.grad) for parameter in step.parameters()]
    try:
        for parameter, _ in kept:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


class Attributes:
    """What the modules of `step` have beside parameters and buffers."""

    def __init__(self, step: nn.Module) -> None:
        self._kept = [(module, dict(_own(module))) for module in step.modules()]

    def restore(self, copied: Callable[[Any], Any] = lambda value: value) -> None:
        """The modules have it again."""
        for module, attributes in self._kept:
            for key, _ in _own(module):
                if key not in attributes:
                    del vars(module)[key]
            vars(module).update((key, copied(value)) for key, value in attributes.items())

    def begin(self) -> None:
        """The modules have it again, with copies of its containers, which a call may change."""
        self.restore(lambda value: copy.copy(value) if type(value) in (dict, OrderedDict, list, set) else value)


def _own(module: nn.Module) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in vars(module).items() if key not in _OF_ALL_MODULES]


_OF_ALL_MODULES = vars(nn.Module()).keys() - {"training"}


@contextlib.contextmanager
def trial(step: nn.Module) -> Iterator[Attributes]:
    """Output, logs and warnings are dropped. Afterwards the tensors and attributes of all modules and the random
    generators are as before."""
    attributes = Attributes(step)
    places: list[dict[str, Any]] = [held for module in step.modules() for held in (module._parameters, module._buffers)]
    tensors = [(held, dict(held)) for held in places]
    try:
        attributes.begin()
        with quiet(), as_written(), generators_kept():
            yield attributes
    finally:
        attributes.restore()
        for held, own in tensors:
            held.clear()
            held.update(own)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards all generators of random numbers are as they were."""
    with torch._C._DisableTorchDispatch():  # or a mode of fake tensors has the state, which has no values
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        with torch._C._DisableTorchDispatch():
            torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


@contextlib.contextmanager
def tied_once(step: nn.Module) -> Iterator[None]:
    """Of parameters and buffers that modules share, only the first is one: the others read it. A tracer that gives each
    its own input would cut the tie."""
    first: dict[int, tuple[nn.Module, str]] = {}
    changed = []
    for module in step.modules():
        shared: dict[str, tuple[nn.Module, str]] = {}
        for kind in ("_parameters", "_buffers"):
            held = getattr(module, kind)
            again = {
                name: first[id(one)]
                for name, one in held.items()
                if one is not None and first.setdefault(id(one), (module, name)) != (module, name)
            }
            own = {name: one for name, one in held.items() if name not in again}
            if again:
                changed.append((module, type(module), kind, held))
                vars(module)[kind] = own
                shared |= again
        if shared:
            read: dict[str, object] = {
                name: property(partial(lambda owner, key, module: getattr(owner, key), *place))
                for name, place in shared.items()
            }
            read |= {"__module__": type(module).__module__, "__qualname__": type(module).__qualname__}
            module.__class__ = type(type(module).__name__, (type(module),), read)
    try:
        yield
    finally:
        for module, kind_of_module, kind, held in reversed(changed):
            module.__class__ = kind_of_module
            vars(module)[kind] = held


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    is_own, original = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, original)
        else:  # it is inherited
            delattr(owner, name)


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """torch.compile has no effect: a compiled function can be neither traced nor recorded. Where torch's compiler is
    not imported, which would take seconds, nothing is compiled yet."""
    if "torch._dynamo" in sys.modules:
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


PLAIN = "_sambasim_plain"
"""The attribute of a buffer that is a plain attribute of its module."""


@contextlib.contextmanager
def buffers_of_plain_tensors(model: nn.Module) -> Iterator[None]:
    """Tensors that are plain attributes of modules are buffers, in no state_dict: export would otherwise refuse them,
    or take their values as constants."""
    promoted = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                delattr(module, name)
                buffer = value.detach()
                setattr(buffer, PLAIN, True)
                module.register_buffer(name, buffer, persistent=False)
                promoted.append((module, name, value))
    try:
        yield
    finally:
        for module, name, value in promoted:
            delattr(module, name)
            setattr(module, name, value)


_is_tracing = False


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    global _is_tracing
    before, _is_tracing = _is_tracing, True
    try:
        yield
    finally:
        _is_tracing = before


def is_tracing() -> bool:
    """Whether a capture, or the user's own torch.compile, traces a model. During a capture torch.compiler says what
    models are to believe: see `answers_of_eager`."""
    return _is_tracing or torch.compiler.is_compiling()


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Garbage collections are rare and skip what exists already: a trace makes a million objects that live until its
    end."""
    thresholds = gc.get_threshold()
    is_thawed = gc.get_freeze_count() == 0
    if is_thawed:
        gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if is_thawed:
            gc.unfreeze()


def written(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], undeclared: Collection[str] = ()
) -> Iterator[Tensor]:
    """The tensors that a call of `func` writes to, by its schema, and those of its arguments in `undeclared`."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.name in undeclared or (argument.alias_info is not None and argument.alias_info.is_write):
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
