"""Other values for a slot, to see whether a call depends on it."""

import array
import collections
import functools
import io
import numbers
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sambasim.compiler.capture.snapshot import LARGEST, MISSING, Slot

_PERTURBED = 0.75

NUMBERS = (*range(33), 49, 50, 99, 100, 199, 499, 500, 999, 1000, 1999, 4999, 9999, 99_999, 999_999, 10**6)
"""What a counter is set to, to see whether anything depends on it: the first calls, and rounds that people choose."""

FEW = tuple(map(NUMBERS.index, (0, 1, 2, 7, 10, 50, 100, 999, 10**6)))
"""Variations where a call takes long."""


def vary(slot: Slot, number: int) -> None:
    """Give a slot the variation `number`, of as many as `NUMBERS`. Raises TypeError for what has none."""
    if slot.kind == "content":
        _vary_content(slot.owner, number)
    elif slot.kind == "position":
        _advance(slot.owner, number)
    else:
        slot.set(_varied(slot.value, number, slot.before))


def _varied(value: Any, number: int, before: Any) -> Any:
    match value:
        case bool():
            return bool(number % 2)
        case int() | float() | np.number() | numbers.Number():
            kind: Any = type(value)
            return kind(NUMBERS[number])
        case str() | bytes():
            count = min(NUMBERS[number], LARGEST)
            return (value * -(-count // max(len(value), 1)))[:count]
        case Tensor():
            return perturbed(value, number)
        case tuple():
            varied = [_varied(item, number, item) for item in value]
            return type(value)(*varied) if hasattr(value, "_fields") else tuple(varied)
        case _ if before is not MISSING:
            return before
    raise TypeError(f"a {type(value).__name__} has no variation")


def perturbed(tensor: Tensor, number: int = 1) -> Tensor:
    """Other values within about the same range, of the same kind."""
    rolled = tensor.detach().roll(number) if tensor.numel() else tensor.detach().clone()
    return rolled * _PERTURBED if tensor.is_floating_point() else rolled


def _vary_content(thing: Any, number: int) -> None:
    """A container gets as many items as `number` says."""
    count = min(NUMBERS[number], LARGEST)
    match thing:
        case list() | collections.deque() | bytearray() | array.array():
            items = list(thing) or [0]
            while thing:
                thing.pop()
            thing.extend((items * -(-count // len(items)))[:count])
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
        return
    if isinstance(thing, io.IOBase):
        thing.seek(0, number % 2 * io.SEEK_END)
        return
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
