"""Which data a run reads, in a few characters, so that hosts and a resumed run can be compared. docs/formats.md
defines it."""

import hashlib
import sys
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from io import IOBase
from itertools import islice
from logging import Logger
from operator import itemgetter
from pathlib import Path, PurePath
from threading import Lock, RLock
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Generic, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sambasim.files import in_memory
from sambasim.units import MIB

Array: TypeAlias = Tensor | NDArray[np.generic]

READ_WHOLE_BYTES = 16 * MIB
_BLOCKS = 64  # of an array that is not read whole
_LEAST_BLOCK = 256  # bytes
_MOST_ITEMS = 16_384  # of all that is held
_FEWEST_ITEMS = 8  # of one of many
_DEEPEST = 8  # levels of objects, lists and mappings in others


def identity_of(*held: object) -> str:
    """That of data sets, or of whatever holds arrays: `content`, `sample` or `length`, and a digest. None of their
    methods is called."""
    whole = list(islice(_walk(held, _DEEPEST, sys.maxsize), _MOST_ITEMS + 1))
    if len(whole) > _MOST_ITEMS:
        most = 2 * _FEWEST_ITEMS * _MOST_ITEMS  # where levels of lists have the fewest each
        whole = [_LEFT_OUT, *islice(_walk(held, _DEEPEST, _MOST_ITEMS), most)]
    sha256, arrays = hashlib.sha256(), [found for found in whole if isinstance(found, Tensor | np.ndarray)]
    for text in whole:
        if isinstance(text, str):
            sha256.update(f"{text};".encode())
    is_whole, budget = _LEFT_OUT not in {text for text in whole if isinstance(text, str)}, READ_WHOLE_BYTES
    if sum(array.nbytes for array in arrays) > budget:
        is_whole, budget = False, budget // len(arrays)
    for array in arrays:
        sha256.update(f"{array.dtype}{tuple(array.shape)};".encode())
        for part in _parts(array, budget):
            sha256.update(_bytes(part))
    holds = arrays or any(isinstance(text, _Number) for text in whole)
    kind = ("content" if is_whole else "sample") if holds else "length"
    return f"{kind} {sha256.hexdigest()[:16]}"


def identity_of_file(path: Path) -> str:
    with in_memory(path):
        return identity_of(np.memmap(path, np.uint8, "r") if path.stat().st_size else [])


_LEFT_OUT = "…"
_LISTS = (list, tuple, deque)
_SEEN = {object, dict, defaultdict, OrderedDict, SimpleNamespace, torch.Size, Generic, *_LISTS}
_HEAP_TYPE = 1 << 9  # of CPython's flags of a type: not static
_NO_DATA = (
    str,
    PurePath,
    type,
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
    Logger,
    Enum,
    torch.dtype,
    torch.device,
    IOBase,
    type(Lock()),
    type(RLock()),
    weakref.ref,
)
"""One rank alone may have some of them, in a progress bar, say."""


class _Number(str):
    __slots__ = ()


def _walk(held: object, levels: int, most: int, *, listed: bool = False) -> Iterator[Array | str | None]:
    """The arrays that `held` has, in lists, mappings and attributes of objects, the numbers and the lengths of lists,
    what is left out, and None for what is no data. Texts may differ between hosts: names of folders. So may numbers
    that are not `listed`: the rank of the process."""
    match held:
        case None | Enum() | bool() | int() | float() | complex() | np.generic() if not listed:
            yield None
        case int():
            yield _Number(int.__repr__(held))
        case float():
            yield _Number(float.__repr__(held))
        case complex():
            yield _Number(complex.__repr__(held))
        case range():
            yield _Number(repr(held))
        case str() | PurePath() if listed:  # it is a sample, or names a file with one
            yield _LEFT_OUT
        case _ if held is None or isinstance(held, _NO_DATA):
            yield None
        case Tensor():
            dense = held.layout is torch.strided and not held.is_nested and not held.is_quantized
            yield held.detach() if dense and held.device.type == "cpu" else _LEFT_OUT
        case np.ndarray() | np.generic():
            plain = isinstance(held, np.generic) or type(held) in (np.ndarray, np.memmap)
            yield np.asarray(held) if plain and not held.dtype.hasobject else _LEFT_OUT
        case bytes() | bytearray():
            yield np.frombuffer(held, np.uint8)
        case _ if not levels:
            yield _LEFT_OUT
        case _:
            yield from _walk_within(held, levels - 1, most, listed)


def _walk_within(held: Any, levels: int, most: int, listed: bool) -> Iterator[Array | str | None]:
    yield None
    if not _is_seen(type(held)):
        yield _LEFT_OUT
    base: Any = next((base for base in _LISTS if isinstance(held, base)), None)
    if base is not None:
        length = base.__len__(held)
        yield f"{length} items"
        for at in _spread(length, most):
            yield from _walk(base.__getitem__(held, at), levels, max(most // length, _FEWEST_ITEMS), listed=True)
    if isinstance(held, dict):
        values = _by_name(held)
        for at in _spread(len(values), most):
            yield from _walk(values[at], levels, max(most // len(values), _FEWEST_ITEMS), listed=listed)
    for value in _by_name(_attributes(held)):
        yield from _walk(value, levels, most)


def _is_seen(kind: type) -> bool:
    """Whether its objects hold nothing but items and attributes: no class that is not written in Python makes them."""
    made = {
        base
        for base in kind.__mro__
        if not base.__flags__ & _HEAP_TYPE or isinstance(vars(base).get("__new__"), BuiltinFunctionType)
    }
    return made <= _SEEN


def _attributes(held: object) -> dict[str, object]:
    found = dict(getattr(held, "__dict__", {}))
    for base in type(held).__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # that is not set
                    found[name] = slot.__get__(held)
    return found


def _by_name(held: dict[Any, object]) -> list[object]:
    """Its values, in an order that all hosts have where its keys have one."""
    if {type(name) for name in dict.keys(held)} in ({str}, {int}):
        return [value for _, value in sorted(dict.items(held), key=itemgetter(0))]
    return list(dict.values(held))


def _spread(length: int, most: int) -> Iterator[int]:
    """Up to `most` of the positions in a list, evenly spread, the first and the last among them."""
    count = min(length, most)
    return (at * (length - 1) // max(count - 1, 1) for at in range(count))


def _parts(array: Array, budget: int) -> Iterator[Array]:
    """All of an array, or blocks along its first axis, together of about `budget` bytes."""
    if array.nbytes <= max(budget, _BLOCKS):
        yield array
        return
    blocks = min(len(array), _BLOCKS, max(budget // _LEAST_BLOCK, 2))
    rows = budget * len(array) // (blocks * array.nbytes)
    for start in _spread(len(array) - max(rows, 1) + 1, blocks):
        yield from [array[start : start + rows]] if rows else _parts(array[start], budget // blocks)


def _bytes(array: Array) -> bytes:
    if isinstance(array, Tensor):
        array = array.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return array.tobytes()
