"""A snapshot of every Python slot that a call can reach, in which tensors go by identity: what a call has changed is
what differs between two of them."""

import array
import collections
import contextvars
import ctypes
import decimal
import functools
import gc
import io
import logging
import numbers
import os
import random
import re
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from sambasim.compiler.capture.recording import is_dense
from sambasim.whose_code import is_library_file, is_package_file

MISSING = object()
_LEAVES = (int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device, np.dtype)
_OF_LIBRARIES = {"torch", "numpy", "sambasim", *sys.stdlib_module_names}
_ENTERED = {
    *("types", "argparse", "collections", "functools", "itertools", "builtins", "queue", "_thread", "random"),
    *("threading", "weakref", "_weakrefset", "ctypes", "multiprocessing", "logging", "_csv"),
}
"""Modules of Python whose objects are entered, as those of the user's own classes are."""

_SLOTS = (*_LEAVES, Tensor, np.generic, numbers.Number, types.MethodType, type)
"""What a slot may hold."""

_OF_LOGGERS = ("_cache", "manager", "parent", "root", "handlers")
"""Attributes of a logger that lead to all others, or that any message changes."""

LARGEST = 4096
"""The largest container whose items are slots. Larger ones are one."""

_DIGESTED_BYTES = 1 << 26
"""The largest array of NumPy that is looked at: it may be a data set in a file."""

_OF_MODULES = ("_parameters", "_buffers", "_modules")
_CALLABLES = (
    *(types.MethodType, staticmethod, classmethod, property),
    *(functools.partial, functools.partialmethod, functools.cached_property),
)
"""Of them what they call is entered, by their own name."""


class Slot(NamedTuple):
    """`kind`: a "value", a "tensor", the "content" of a container (its length or its keys), the "position" of an
    iterator or a generator, or of the "process"; `is_registered`: it is a parameter or buffer; `before`: what an
    earlier snapshot has."""

    name: str
    kind: str
    owner: Any
    key: Any
    value: Any
    mark: object = None
    is_registered: bool = False
    before: Any = MISSING

    def set(self, value: Any) -> None:
        if isinstance(self.owner, (dict, list, collections.deque)):
            self.owner[self.key] = value
        else:
            setattr(self.owner, self.key, value)


@functools.cache  # so that its id stays
class _Variable:
    """A ContextVar as an object with one attribute."""

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self._variable = variable

    value = property(lambda self: self._variable.get(MISSING), lambda self, value: self._variable.set(value))


class Snapshot:
    """Of what can be reached from `roots`, which have names."""

    def __init__(self, roots: Mapping[str, object]) -> None:
        process = _process_state().items()
        self.slots = {(name, "process", 0): Slot(name, "process", None, None, value, value) for name, value in process}
        self._seen: dict[int, object] = {}  # so that no other object gets the id of one that is gone
        queue = collections.deque(roots.items())
        while queue:
            queue.extend(self._enter(*queue.popleft()))
        functions = [thing.__code__ for thing in self._seen.values() if isinstance(thing, types.FunctionType)]
        if any(
            "cache_info" in _names_in(function) for function in functions if not is_library_file(function.co_filename)
        ):
            # who does not ask does not see how often a cache was hit
            for thing in [thing for thing in self._seen.values() if isinstance(thing, functools._lru_cache_wrapper)]:
                self._add(
                    Slot(f"{thing.__name__}.cache_info()", "value", thing, "cache_info", None, thing.cache_info())
                )

    def _enter(self, name: str, thing: Any) -> Iterable[tuple[str, Any]]:
        """Add the slots of `thing`. Returns what they hold, by name."""
        if isinstance(thing, _LEAVES) or id(thing) in self._seen:
            return ()
        self._seen[id(thing)] = thing
        kind = "content" if _is_container(thing) else "position" if _is_iterator(thing) else None
        if kind is not None:
            self._add(Slot(name, kind, thing, None, thing, _mark(kind, thing)))
        held = []
        for path, owner, key, value in _children(name, thing):
            if isinstance(value, nn.Parameter):
                needs = value.requires_grad
                self._add(Slot(f"{path}.requires_grad", "value", value, "requires_grad", needs, needs))
            if owner is not None and (isinstance(value, _SLOTS) or _is_plain_tuple(value)):
                kind = "tensor" if isinstance(value, Tensor) else "value"
                is_registered = isinstance(thing, nn.Module) and owner is not vars(thing)
                self._add(Slot(path, kind, owner, key, value, _mark(kind, value), is_registered))
            held.append((path, value))
        return held

    def _add(self, slot: Slot) -> None:
        count = 0
        while (key := (slot.name, slot.kind, count)) in self.slots:
            count += 1
        self.slots[key] = slot

    def registered(self) -> dict[str, Tensor]:
        """The parameters and buffers of all modules, also of those that the model has in a list."""
        slots = (slot for slot in self.slots.values() if slot.is_registered)
        tensors = {slot.name: slot.value for slot in slots if isinstance(slot.value, Tensor)}
        kinds = {True: "foreign parameter", False: "foreign buffer"}
        return {f"{kinds[isinstance(tensor, nn.Parameter)]} {name}": tensor for name, tensor in tensors.items()}

    def names_of_tensors(self) -> dict[int, str]:
        """By id, `kept_0` for `model.kept[0]`, of tensors that are neither parameters nor buffers."""
        slots = (slot for slot in self.slots.values() if slot.kind == "tensor" and not slot.is_registered)
        return {id(slot.value): re.sub(r"^(model|global)|\W+", "_", slot.name).strip("_") for slot in slots}

    def changed_in(self, later: "Snapshot") -> list[Slot]:
        """The slots of `later` that differ from those here, or are new; of a container whose content differs, none of
        its items."""
        changed = []
        for key, slot in later.slots.items():
            before = self.slots.get(key)
            if before is None and isinstance(slot.owner, nn.Parameter):  # which is new itself
                continue
            if before is None or before.mark != slot.mark:
                changed.append(slot._replace(before=MISSING if before is None else before.value))
        whole = tuple(f"{slot.name}{mark}" for slot in changed if slot.kind == "content" for mark in ("[", "."))
        return [slot for slot in changed if not (whole and slot.name.startswith(whole))]


def _process_state() -> dict[str, object]:
    """What is set for the whole process, the generators of random numbers apart, by what it is called."""
    return {
        "the grad mode": torch.is_grad_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "torch.autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "the inference mode": torch.is_inference_mode_enabled(),
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "the number of threads": torch.get_num_threads(),
        "the environment": hash(tuple(sorted(os.environ.items()))),
        "the context of decimal": (decimal.getcontext().prec, decimal.getcontext().rounding),
    }


def _mark(kind: str, value: Any) -> object:
    """What is equal for two values between which nothing has changed."""
    if kind == "tensor" and isinstance(value, Tensor):
        memory = value.untyped_storage()._cdata if is_dense(value) else 0
        return id(value), memory, value.shape, value.dtype, value.requires_grad and not isinstance(value, nn.Parameter)
    if kind == "content":
        if isinstance(value, _OF_BYTES):
            return hash(memoryview(value).tobytes())
        if isinstance(value, np.ndarray):
            return value.shape, value.dtype != object and value.nbytes <= _DIGESTED_BYTES and hash(value.tobytes())
        if isinstance(value, (set, frozenset)):
            return frozenset(map(_plain, value))
        is_large = len(value) > LARGEST
        if isinstance(value, dict):  # a subclass may make its items when it is asked for them
            return tuple(map(_plain, dict.__iter__(value))), is_large and tuple(map(_plain, dict.values(value)))
        return len(value), is_large and tuple(map(_plain, value))
    if kind == "position":
        return _position(value)
    return type(value), repr(value) if isinstance(value, (float, complex, tuple)) else value


_OF_BYTES = (bytearray, array.array, ctypes.Array, ctypes.Structure, ctypes._SimpleCData)


def _plain(item: object) -> object:
    return item if isinstance(item, _LEAVES) else id(item)


def _of_frame(thing: Any) -> object:
    frame = thing.gi_frame
    held = {} if frame is None else frame.f_locals
    return frame and (frame.f_lasti, repr([(key, held[key]) for key in sorted(held) if isinstance(held[key], _LEAVES)]))


_POSITIONS: Mapping[type, Callable[[Any], object]] = {
    types.GeneratorType: _of_frame,
    torch.Generator: lambda thing: hash(thing.get_state().numpy().tobytes()),
    random.Random: lambda thing: hash(thing.getstate()),
    np.random.Generator: lambda thing: repr(thing.bit_generator.state),
    np.random.RandomState: lambda thing: repr(thing.get_state(legacy=False)),
    functools._lru_cache_wrapper: lambda thing: (thing.cache_info().misses, thing.cache_info().currsize),
    io.StringIO: lambda thing: thing.closed or (thing.tell(), hash(thing.getvalue())),
    io.BytesIO: lambda thing: thing.closed or (thing.tell(), hash(thing.getvalue())),
}
"""Of what gives other values each time it is asked, where it stands."""


def _position(thing: Any) -> object:
    found = next((position for kind, position in _POSITIONS.items() if isinstance(thing, kind)), None)
    return found(thing) if found else _reduced(thing)


def _reduced(value: Any) -> object:
    """What an iterator of Python is made of."""
    if isinstance(value, tuple):
        return tuple(map(_reduced, value))
    try:
        return _reduced(value.__reduce__()) if _is_iterator(value) else _plain(value)
    except TypeError:  # it cannot say
        return id(value)


def _is_container(thing: object) -> bool:
    kinds = (dict, list, tuple, set, frozenset, collections.deque, np.ndarray, *_OF_BYTES)
    return isinstance(thing, kinds) and not _is_plain_tuple(thing)


def _is_iterator(thing: object) -> bool:
    if isinstance(thing, tuple(_POSITIONS)):
        return True
    if isinstance(thing, type):
        return False
    return (
        type(thing).__module__ in ("itertools", "builtins")
        and hasattr(thing, "__next__")
        and hasattr(thing, "__reduce__")
    )


def _is_plain_tuple(thing: object) -> bool:
    return isinstance(thing, tuple) and all(isinstance(item, _LEAVES) for item in thing)


def _of_library(module: str) -> bool:
    return module.partition(".")[0] in _OF_LIBRARIES


def _children(name: str, thing: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    """What `thing` holds: a name, the owner and the key by which it is reached, and the value."""
    if isinstance(thing, _CALLABLES):
        yield from ((name, None, None, part) for part in gc.get_referents(thing))
    elif isinstance(thing, functools._lru_cache_wrapper):
        yield name, None, None, thing.__wrapped__
    elif isinstance(thing, types.FunctionType):
        yield from _of_function(thing)
    elif isinstance(thing, type):
        yield from _of_class(thing)
    elif isinstance(thing, contextvars.ContextVar):
        yield f"{name}.get()", _Variable(thing), "value", _Variable(thing).value
    elif isinstance(thing, types.GeneratorType):
        frame = thing.gi_frame
        yield from ((f"{name}.{key}", None, None, value) for key, value in (frame.f_locals if frame else {}).items())
    elif not isinstance(thing, types.ModuleType | types.BuiltinFunctionType | FakeTensor):
        yield from _of_container(name, thing)
        yield from _of_object(name, thing)
        if _is_iterator(thing) or type(thing).__module__ == "_csv":  # what it goes over
            yield from ((name, None, None, part) for part in gc.get_referents(thing) if not isinstance(part, type))


def _of_container(name: str, thing: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    if isinstance(thing, dict) and dict.__len__(thing) <= LARGEST:
        yield from ((f"{name}[{_key(key)}]", thing, key, value) for key, value in list(dict.items(thing)))
    elif isinstance(thing, (list, tuple, collections.deque)) and len(thing) <= LARGEST:
        yield from ((f"{name}[{index}]", thing, index, value) for index, value in enumerate(thing))


def _key(key: object) -> str:
    return repr(key) if isinstance(key, _LEAVES) else type(key).__name__


def _of_object(name: str, thing: Any) -> Iterator[tuple[str, Any, Any, Any]]:
    module = type(thing).__module__
    if _of_library(module) and not (module.partition(".")[0] in _ENTERED or module.startswith("torch")):
        if module in sys.stdlib_module_names:  # as the number of changes of an SQLite connection
            yield from _of_descriptors(name, thing, types.GetSetDescriptorType, int)
        return
    attributes = _attributes(thing)
    if isinstance(thing, nn.Module):
        for kind in _OF_MODULES:
            held = vars(thing).get(kind, {})
            yield from ((f"{name}.{key}", held, key, value) for key, value in list(held.items()))
    if attributes is not None:
        kinds = {nn.Module: (*_OF_MODULES, "training"), logging.Logger: _OF_LOGGERS}
        left_out = next((names for kind, names in kinds.items() if isinstance(thing, kind)), ())
        owner = thing if isinstance(thing, threading.local) else attributes
        for key, value in list(attributes.items()):
            if key not in left_out:
                yield f"{name}.{key}", owner, key, value
    if not _of_library(module):
        yield from _of_descriptors(name, thing, types.MemberDescriptorType, object)  # of __slots__
        yield f"{name}.__class__", thing, "__class__", type(thing)


def _of_descriptors(name: str, thing: Any, kind: type, held: type) -> Iterator[tuple[str, Any, Any, Any]]:
    """What is in the memory of `thing` and not in its dictionary."""
    for key in [key for cls in type(thing).__mro__ for key, thing in vars(cls).items() if isinstance(thing, kind)]:
        if isinstance(value := getattr(thing, key, None), held):
            yield f"{name}.{key}", thing, key, value


def _attributes(thing: object) -> dict[str, Any] | None:
    """Those that it has itself, without what its class may do when it is asked for them."""
    try:
        found = thing.__dict__ if isinstance(thing, threading.local) else object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return found if isinstance(found, dict) else None


def _of_class(thing: type) -> Iterator[tuple[str, Any, Any, Any]]:
    if _of_library(thing.__module__):
        return
    for key, value in list(vars(thing).items()):
        if key not in ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__slots__"):
            yield f"{thing.__name__}.{key}", thing, key, value
    for base in (*thing.__bases__, type(thing)):
        yield base.__name__, None, None, base


def _of_function(thing: types.FunctionType) -> Iterator[tuple[str, Any, Any, Any]]:
    """Its closure, its defaults, its attributes, and the globals that its code names."""
    called = f"{thing.__name__} at {Path(thing.__code__.co_filename).name}:{thing.__code__.co_firstlineno}"
    for key, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
        try:
            yield f"{key} of {called}", cell, "cell_contents", cell.cell_contents
        except ValueError:  # it is empty
            continue
    if is_library_file(thing.__code__.co_filename):
        return
    for index, value in enumerate((*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())):
        yield f"default {index} of {called}", None, None, value
    yield from ((f"{thing.__name__}.{key}", vars(thing), key, value) for key, value in list(vars(thing).items()))
    names = _names_in(thing.__code__)
    for key in sorted(names & thing.__globals__.keys()):
        yield f"global {key}", thing.__globals__, key, thing.__globals__[key]
    package = thing.__globals__.get("__package__") or ""
    imported = [sys.modules.get(found) for key in names for found in (key, f"{package}.{key}")]
    modules, seen = [*map(thing.__globals__.get, names), *imported], set[int]()
    while modules:  # a name in the code is one of an attribute too
        module = modules.pop()
        if isinstance(module, types.ModuleType) and id(module) not in seen:
            seen.add(id(module))
            held = {key: vars(module)[key] for key in sorted(names & vars(module).keys())}
            if not _is_users(module):
                held = {key: value for key, value in held.items() if isinstance(value, _LEAVES)}
            modules += held.values()
            yield from ((f"global {module.__name__}.{key}", vars(module), key, value) for key, value in held.items())


def _is_users(module: types.ModuleType) -> bool:
    """Whether it is neither of a library nor installed."""
    return not _of_library(module.__name__) and not is_package_file(getattr(module, "__file__", None) or "")


@functools.cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    """With constants that may be names: of `setattr`, or of a key of `globals()`."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    strings = (constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier())
    return frozenset(code.co_names).union(strings, *map(_names_in, inner))
