"""A snapshot of every Python slot that a call can reach, tensors by identity: two differ in what a call has changed."""

import collections
import contextlib
import contextvars
import decimal
import functools
import gc
import itertools
import logging
import os
import re
import sys
import threading
import types
from collections.abc import Iterator, Mapping, Set
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from sambasim.compiler.capture.recording import role_of
from sambasim.compiler.capture.slots import LARGEST, LEAVES, MISSING, Slot, held_slot, is_iterator, own_slot
from sambasim.whose_code import is_library_file, is_package_file

_Child: TypeAlias = tuple[str, Any, Any, Any]
"""What a thing holds: a name, the owner and the key by which it is reached, and the value."""

_OF_LIBRARIES = {"torch", "numpy", "sambasim", *sys.stdlib_module_names}

_ENTERED = {
    *("types", "argparse", "collections", "functools", "itertools", "builtins", "queue", "_thread", "random"),
    *("threading", "weakref", "_weakrefset", "ctypes", "multiprocessing", "logging", "_csv"),
}
"""Modules of Python whose objects are entered, as those of the user's own classes are."""

_WRAPPERS = (
    *(types.MethodType, staticmethod, classmethod, property),
    *(functools.partial, functools.partialmethod, functools.cached_property),
)
"""What they wrap is entered, by their own name."""


class Snapshot:
    """Of what can be reached from `roots`, which have names."""

    def __init__(self, roots: Mapping[str, object]) -> None:
        process = process_state().items()
        self.slots = {(name, "process", 0): Slot(name, "process", None, None, value, value) for name, value in process}
        self._modules: dict[str, nn.Module] = {}
        self._seen: dict[int, object] = {}  # so that no other object gets the id of one that is gone
        self._imported = {end for name in sys.modules for end in _ends(name)}
        queue = collections.deque(roots.items())
        while queue:
            queue.extend(self._enter(*queue.popleft()))
        codes = [thing.__code__ for thing in self._seen.values() if isinstance(thing, types.FunctionType)]
        # Who does not ask does not see how often a cache was hit.
        if any("cache_info" in _names_in(code) for code in codes if not is_library_file(code.co_filename)):
            for thing in [thing for thing in self._seen.values() if isinstance(thing, functools._lru_cache_wrapper)]:
                name = f"{thing.__name__}.cache_info()"
                self._add(Slot(name, "value", thing, "cache_info", None, thing.cache_info()))

    def _enter(self, name: str, thing: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(thing, LEAVES) or id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing
        if not isinstance(thing, types.FunctionType):
            self._add(own_slot(name, thing))
        if isinstance(thing, nn.Module):
            self._modules[name] = thing
        for path, owner, key, value in _children(name, thing, self._imported):
            if isinstance(value, Tensor) and isinstance(value, nn.Parameter):  # the first is the fast one
                needs = value.requires_grad
                self._add(Slot(f"{path}.requires_grad", "value", value, "requires_grad", needs, needs))
            is_registered = isinstance(thing, nn.Module) and owner is not vars(thing)
            self._add(held_slot(path, owner, key, value, is_registered))
            yield path, value

    def _add(self, slot: Slot | None) -> None:
        if slot is not None:
            key = slot.name, slot.kind, 0
            while key in self.slots:
                key = slot.name, slot.kind, key[2] + 1
            self.slots[key] = slot

    def labelled(self) -> dict[str, Tensor]:
        """By label the parameters and buffers of all modules, also of those that the model has in a list, and other
        tensors that require a gradient."""
        tensors = {}
        for slot in self.slots.values():
            if isinstance(slot.value, Tensor) and (slot.is_registered or slot.value.requires_grad):
                kind = role_of(slot.value)
                tensors[f"foreign {kind if slot.is_registered else 'tensor'} {slot.name}"] = slot.value
        return tensors

    def holder_of(self, label: str, model: nn.Module) -> str:
        """The outermost module, none of `model`, that has the tensor of a label; else the tensor itself."""
        own = set(map(id, model.modules()))
        path = label.removeprefix("foreign ").partition(" ")[2]
        outside = (name for name, module in self._modules.items() if id(module) not in own)
        holder = next((name for name in outside if path.startswith(f"{name}.")), None)
        named = f"the parameters of {holder}" if holder else f"the tensor {path}" if path else "a parameter"
        return named.replace(" global ", " ")

    def names_of_tensors(self) -> dict[int, str]:
        """By id, `kept_0` for `model.kept[0]`, of tensors."""
        slots = (slot for slot in self.slots.values() if slot.kind == "tensor")
        return {id(slot.value): re.sub(r"^(model|global)|\W+", "_", slot.name).strip("_") for slot in slots}

    def changed_in(self, later: "Snapshot") -> list[Slot]:
        """The slots of `later` that are new or differ from those here; of a container with other content, no items."""
        changed = []
        for key, slot in later.slots.items():
            before = self.slots.get(key)
            if before is None and not isinstance(slot.owner, nn.Parameter):  # of a new one, nothing is told
                changed.append(slot)
            elif before is not None and before.mark != slot.mark:
                changed.append(slot._replace(before=before.value))
        whole = tuple(f"{slot.name}{mark}" for slot in changed if slot.kind == "content" for mark in ("[", "."))
        return [slot for slot in changed if not slot.name.startswith(whole)]


_SMALLEST = 2.0**-1022
"""The smallest normal number. Python computes with it as kernels do."""


def settings_of_kernels() -> dict[str, object]:
    """What is set for the whole process, and changes what kernels compute, by what it is called."""
    precision = torch._C._get_fp32_precision_getter
    of_mkldnn = torch._C._get_mkldnn_enabled(), torch._C._get_mkldnn_deterministic(), torch._C._get_onednn_allow_tf32()
    return {
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "the number of threads": torch.get_num_threads(),
        "torch.set_float32_matmul_precision": (torch.get_float32_matmul_precision(), precision("generic", "all")),
        "torch.backends.mkldnn": (*of_mkldnn, *(precision("mkldnn", kind) for kind in ("all", "matmul", "conv"))),
        "torch.backends.nnpack": torch._C._get_nnpack_enabled(),
        "torch.set_flush_denormal": _SMALLEST / 2 == 0,
    }


def process_state() -> dict[str, object]:
    """What is set for the whole process, the generators of random numbers apart, by what it is called."""
    return {
        "the grad mode": torch.is_grad_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "torch.autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "the inference mode": torch.is_inference_mode_enabled(),
        "the environment": hash(tuple(sorted(os.environ.items()))),
        "the context of decimal": (decimal.getcontext().prec, decimal.getcontext().rounding),
        **settings_of_kernels(),
    }


def _ends(name: str) -> Iterator[str]:
    """How an import may name a module from within its packages: `a.b.c`, `b.c` and `c`."""
    while name:
        yield name
        name = name.partition(".")[2]


def _of_library(module: str) -> bool:
    return module.partition(".")[0] in _OF_LIBRARIES


def _children(name: str, thing: Any, imported: Set[str]) -> Iterator[_Child]:
    """What `thing`, which is called `name`, holds. Without an owner and a key, a value is entered, but is no slot.
    `imported`: see _ends, of all modules."""
    if isinstance(thing, _WRAPPERS):
        yield from ((name, None, None, part) for part in gc.get_referents(thing))
    elif isinstance(thing, functools._lru_cache_wrapper):
        yield name, None, None, thing.__wrapped__
        held = gc.get_referents(thing)  # each result behind its key, or in a dictionary by it
        pairs = [*itertools.pairwise(held), *(pair for one in held if type(one) is dict for pair in one.items())]
        for key, network in [pair for pair in pairs if isinstance(pair[1], nn.Module)]:
            given = (str(one) for one in (key if isinstance(key, tuple) else (key,)) if isinstance(one, LEAVES))
            yield f"{name}({', '.join(given)})", None, None, network
    elif isinstance(thing, types.FunctionType):
        yield from _of_function(thing, imported)
    elif isinstance(thing, type):
        yield from _of_class(thing)
    elif isinstance(thing, contextvars.ContextVar):
        yield f"{name}.get()", thing, "value", thing.get(MISSING)
    elif isinstance(thing, types.GeneratorType):
        frame = thing.gi_frame
        yield from ((f"{name}.{key}", None, None, value) for key, value in (frame.f_locals if frame else {}).items())
    elif not isinstance(thing, types.ModuleType | types.BuiltinFunctionType | FakeTensor):
        if isinstance(thing, dict) and dict.__len__(thing) <= LARGEST:
            for key, value in list(dict.items(thing)):
                yield f"{name}[{repr(key) if isinstance(key, LEAVES) else type(key).__name__}]", thing, key, value
        elif isinstance(thing, (list, tuple, collections.deque)) and len(thing) <= LARGEST:
            yield from ((f"{name}[{index}]", thing, index, value) for index, value in enumerate(thing))
        yield from _of_object(name, thing)
        if is_iterator(thing) or type(thing).__module__ == "_csv":  # what it reads has no name in Python
            yield from ((name, None, None, part) for part in gc.get_referents(thing) if not isinstance(part, type))


def _of_object(name: str, thing: Any) -> Iterator[_Child]:
    module = type(thing).__module__
    if _of_library(module) and not (module.partition(".")[0] in _ENTERED or module.startswith("torch")):
        if module in sys.stdlib_module_names:  # as the number of changes of an SQLite connection
            yield from _of_descriptors(name, thing, types.GetSetDescriptorType, int)
        return
    left_out: tuple[str, ...] = ()
    if isinstance(thing, logging.Logger):  # these lead to all others, or any message changes them
        left_out = ("_cache", "manager", "parent", "root", "handlers")
    elif isinstance(thing, nn.Module):
        left_out = ("_parameters", "_buffers", "_modules", "training")
        for held in [vars(thing).get(kind, {}) for kind in left_out[:3]]:
            yield from ((f"{name}.{key}", held, key, value) for key, value in list(held.items()))
    if (attributes := _attributes(thing)) is not None:
        owner = thing if isinstance(thing, threading.local) else attributes
        held_by = [(key, value) for key, value in attributes.items() if key not in left_out]
        yield from ((f"{name}.{key}", owner, key, value) for key, value in held_by)
    if not _of_library(module):
        yield from _of_descriptors(name, thing, types.MemberDescriptorType, object)  # of __slots__
        yield f"{name}.__class__", thing, "__class__", type(thing)


def _of_descriptors(name: str, thing: Any, kind: type, held: type) -> Iterator[_Child]:
    """What is in the memory of `thing` and not in its dictionary."""
    for key in [key for cls in type(thing).__mro__ for key, thing in vars(cls).items() if isinstance(thing, kind)]:
        if isinstance(value := getattr(thing, key, None), held):
            yield f"{name}.{key}", thing, key, value


def _attributes(thing: object) -> dict[str, Any] | None:
    """Those that it has itself, without what its class may do when it is asked for them."""
    try:
        own = thing.__dict__ if isinstance(thing, threading.local) else object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return own if isinstance(own, dict) else None


def _of_class(thing: type) -> Iterator[_Child]:
    if _of_library(thing.__module__):
        return
    for key, value in list(vars(thing).items()):
        if key not in ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__slots__"):
            yield f"{thing.__name__}.{key}", thing, key, value
    yield from ((base.__name__, None, None, base) for base in (*thing.__bases__, type(thing)))


def _of_function(thing: types.FunctionType, imported: Set[str]) -> Iterator[_Child]:
    """Its closure, its defaults, its attributes, and the globals that its code names."""
    called = f"{thing.__name__} at {os.path.basename(thing.__code__.co_filename)}:{thing.__code__.co_firstlineno}"
    for key, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            yield f"{key} of {called}", cell, "cell_contents", cell.cell_contents
    if is_library_file(thing.__code__.co_filename):
        return
    for index, value in enumerate((*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values())):
        yield f"default {index} of {called}", None, None, value
    yield from ((f"{thing.__name__}.{key}", vars(thing), key, value) for key, value in list(vars(thing).items()))
    names = _names_in(thing.__code__)
    for key in sorted(names & thing.__globals__.keys()):
        yield f"global {key}", thing.__globals__, key, thing.__globals__[key]
    package = thing.__globals__.get("__package__") or ""
    named = [sys.modules.get(module) for key in names & imported for module in (key, f"{package}.{key}")]
    modules, seen = [*map(thing.__globals__.get, names), *named], set[int]()
    while modules:  # a name in the code is one of an attribute too
        module = modules.pop()
        if isinstance(module, types.ModuleType) and id(module) not in seen:
            seen.add(id(module))
            is_installed = is_package_file(getattr(module, "__file__", None) or "")
            kinds = LEAVES if _of_library(module.__name__) or is_installed else object
            held = [(key, vars(module)[key]) for key in sorted(names & vars(module).keys())]
            for key, value in held:
                if isinstance(value, kinds):
                    modules.append(value)
                    yield f"global {module.__name__}.{key}", vars(module), key, value


@functools.cache
def _names_in(code: types.CodeType) -> frozenset[str]:
    """With constants that may be names: of `setattr`, or of a key of `globals()`."""
    strings = (constant for constant in code.co_consts if isinstance(constant, str) and constant.isidentifier())
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(code.co_names).union(strings, *inner)
