"""Places in which Python holds what a call may change, what marks a change, and other values to try in them."""

import array
import collections
import contextvars
import ctypes
import functools
import io
import numbers
import random
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sambasim.compiler.capture.sharing import is_dense

MISSING = object()

LEAVES = (int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype, torch.device, np.dtype)

_HELD = (*LEAVES, Tensor, np.generic, numbers.Number, types.MethodType, type)  # what a slot may hold

LARGEST = 4096  # the largest container whose items are slots. Larger ones are one

_DIGESTED_BYTES = 1 << 26  # the largest array of NumPy that is looked at: it may be a data set in a file


class Slot(NamedTuple):
    """`kind`: a "value", a "tensor", the "content" of a container (its length or keys), the "position" of an iterator
    or a generator, or of the "process"; `is_registered`: a parameter or buffer; `before`: its earlier value."""

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
        elif isinstance(self.owner, contextvars.ContextVar):
            self.owner.set(value)
        else:
            setattr(self.owner, self.key, value)


def held_slot(name: str, owner: object, key: object, value: Any, is_registered: bool) -> Slot | None:
    """Of a value that is reached by an owner and a key; None if it is no value of its own."""
    if owner is None or not (isinstance(value, _HELD) or _is_plain_tuple(value)):
        return None
    if not isinstance(value, Tensor):
        plain = repr(value) if isinstance(value, (float, complex, tuple)) else value
        return Slot(name, "value", owner, key, value, (type(value), plain), is_registered)
    memory = value.untyped_storage()._cdata if is_dense(value) else 0
    is_made = value.requires_grad and not isinstance(value, nn.Parameter)
    mark = id(value), memory, value.shape, value.dtype, is_made
    return Slot(name, "tensor", owner, key, value, mark, is_registered)


def own_slot(name: str, thing: Any) -> Slot | None:
    """Of what a container holds, or where an iterator stands."""
    kinds = (dict, list, tuple, set, frozenset, collections.deque, np.ndarray, *_BYTES)
    if isinstance(thing, kinds) and not _is_plain_tuple(thing):
        return Slot(name, "content", thing, None, thing, _content(thing))
    if not is_iterator(thing):
        return None
    position = next((position for kind, position in _POSITIONS.items() if isinstance(thing, kind)), _reduced)
    return Slot(name, "position", thing, None, thing, position(thing))


def _content(thing: Any) -> object:
    if isinstance(thing, _BYTES):
        return hash(memoryview(thing).tobytes())
    if isinstance(thing, np.ndarray):
        return thing.shape, thing.dtype != object and thing.nbytes <= _DIGESTED_BYTES and hash(thing.tobytes())
    if isinstance(thing, (set, frozenset)):
        return frozenset(map(_plain, thing))
    is_large = len(thing) > LARGEST
    if isinstance(thing, dict):  # a subclass may make its items when it is asked for them
        return tuple(map(_plain, dict.__iter__(thing))), is_large and tuple(map(_plain, dict.values(thing)))
    return len(thing), is_large and tuple(map(_plain, thing))


_BYTES = (bytearray, array.array, ctypes.Array, ctypes.Structure, ctypes._SimpleCData)


def _plain(item: object) -> object:
    return item if isinstance(item, LEAVES) else id(item)


def _of_frame(thing: Any) -> object:
    frame = thing.gi_frame
    held = {} if frame is None else frame.f_locals
    return frame and (frame.f_lasti, repr([(key, held[key]) for key in sorted(held) if isinstance(held[key], LEAVES)]))


_POSITIONS: Mapping[type, Callable[[Any], object]] = {
    types.GeneratorType: _of_frame,
    torch.Generator: lambda thing: hash(thing.get_state().numpy().tobytes()),
    random.Random: lambda thing: hash(thing.getstate()),
    np.random.Generator: lambda thing: repr(thing.bit_generator.state),
    np.random.RandomState: lambda thing: repr(thing.get_state(legacy=False)),
    functools._lru_cache_wrapper: lambda thing: (thing.cache_info().misses, thing.cache_info().currsize),
    **dict.fromkeys((io.StringIO, io.BytesIO), lambda thing: thing.closed or (thing.tell(), hash(thing.getvalue()))),
}
"""Of what gives other values each time it is asked, where it stands."""

_WITH_POSITION = tuple(_POSITIONS)


def _reduced(value: Any) -> object:
    """What an iterator of Python is made of."""
    if isinstance(value, tuple):
        return tuple(map(_reduced, value))
    try:
        return _reduced(value.__reduce__()) if is_iterator(value) else _plain(value)
    except TypeError:  # it cannot say
        return id(value)


def is_iterator(thing: object) -> bool:
    if isinstance(thing, _WITH_POSITION):
        return True
    is_pythons = type(thing).__module__ in ("itertools", "builtins") and not isinstance(thing, type)
    return is_pythons and hasattr(thing, "__next__") and hasattr(thing, "__reduce__")


def _is_plain_tuple(thing: object) -> bool:
    return isinstance(thing, tuple) and all(isinstance(item, LEAVES) for item in thing)


NUMBERS = (*range(33), 49, 50, 99, 100, 199, 499, 500, 999, 1000, 1999, 4999, 9999, 99_999, 999_999, 10**6)
"""What a counter is set to, to see whether anything depends on it: the first calls, and rounds that people choose."""

FEW = tuple(map(NUMBERS.index, (0, 1, 2, 7, 10, 50, 100, 999, 10**6)))  # variations where a call takes long


def vary(slot: Slot, number: int) -> None:
    """Give a slot the variation `number`, of as many as `NUMBERS`. Raises TypeError for what has none."""
    if slot.kind == "content":
        _vary_content(slot.owner, number)
    elif slot.kind == "position":
        _advance(slot.owner, number)
    else:
        slot.set(_varied(slot.value, number, slot.before))


def _varied(value: Any, number: int, before: Any) -> Any:
    kind: Any = type(value)
    match value:
        case bool():
            return bool(number % 2)
        case int() | float() | np.number() | numbers.Number():
            return kind(NUMBERS[number])
        case str() | bytes():
            return _repeated(value, number)
        case Tensor():
            return perturbed(value, number)
        case tuple():
            varied = [_varied(item, number, item) for item in value]
            return kind(*varied) if hasattr(value, "_fields") else tuple(varied)
        case _ if before is not MISSING:
            return before
    raise TypeError(f"a {kind.__name__} has no variation")


def _repeated(items: Any, number: int) -> Any:
    count = min(NUMBERS[number], LARGEST)
    return (items * -(-count // max(len(items), 1)))[:count]


def perturbed(tensor: Tensor, number: int = 1) -> Tensor:
    """Other values within about the same range, of the same kind."""
    rolled = tensor.detach().roll(number) if tensor.numel() else tensor.detach().clone()
    return rolled * 0.75 if tensor.is_floating_point() else rolled


def _vary_content(thing: Any, number: int) -> None:
    count = min(NUMBERS[number], LARGEST)
    match thing:
        case list() | collections.deque() | bytearray() | array.array():
            items = list(thing) or [0]
            while thing:
                thing.pop()
            thing.extend(_repeated(items, number))
        case dict():
            items = list(thing.items())
            thing.clear()
            thing.update(items[:count])
            if items and isinstance(items[-1][0], int | str):
                made = (type(items[-1][0])(f"{extra}") for extra in range(10**6, 10**6 + count - len(thing)))
                thing.update(dict.fromkeys(made, items[-1][1]))
        case set():
            thing.clear()
            thing.update(range(count))
        case np.ndarray():
            thing[...] = np.roll(thing, 1) * NUMBERS[number]
        case _:
            raise TypeError(f"a {type(thing).__name__} has no variation")


def _advance(thing: Any, number: int) -> None:
    if isinstance(thing, functools._lru_cache_wrapper):
        thing.cache_clear()
    elif isinstance(thing, io.IOBase):
        thing.seek(0, number % 2 * io.SEEK_END)
    else:
        draw = getattr(thing, "random", None) or functools.partial(next, thing)
        for _ in range((1, 2, 7, 10, 50, 100)[number % 6]):
            draw()


def fill(held: Iterable[Tensor], values: Iterable[Tensor], seed: int) -> None:
    """Give tensors their values, and the generators a seed."""
    with torch.no_grad():
        for thing, value in zip(held, values, strict=True):
            thing.copy_(value)
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
