"""Which data a run reads, in a few characters, so that hosts and a resumed run can be compared. docs/formats.md
defines it."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sambasim.units import MIB

Array: TypeAlias = Tensor | NDArray[np.generic]

READ_WHOLE_BYTES = 16 * MIB
_BLOCKS = 64  # of an array that is not read whole
_MOST_ITEMS = 16_384  # of the lists of a data set
_FEWEST_ITEMS = 8  # of a list in another
_DEEPEST = 8  # levels of data sets, lists and mappings in others


def identity_of(*held: object) -> str:
    """That of data sets, or of whatever holds arrays: `content`, `sample` or `length`, and a digest. None of their code
    runs."""
    sha256, arrays, kind = hashlib.sha256(), list[Array](), "length"
    for found in _walk(held, _DEEPEST, _MOST_ITEMS):
        if isinstance(found, Tensor | np.ndarray):
            arrays.append(found)
        else:
            sha256.update(f"{found};".encode())
        if not isinstance(found, str):
            kind = "content" if kind == "length" else kind
        elif found == _LEFT_OUT:
            kind = "sample"
    budget = READ_WHOLE_BYTES
    if sum(array.nbytes for array in arrays) > budget:
        kind, budget = "sample", budget // len(arrays)
    for array in arrays:
        sha256.update(f"{array.dtype}{tuple(array.shape)};".encode())
        for part in _parts(array, budget):
            sha256.update(_bytes(part))
    return f"{kind} {sha256.hexdigest()[:16]}"


def identity_of_file(path: Path) -> str:
    return identity_of(np.memmap(path, np.uint8, "r") if path.stat().st_size else [])


_LEFT_OUT = "…"


def _walk(held: object, levels: int, most: int) -> Iterator[object]:
    """The arrays that `held` has, in lists, mappings and attributes of data sets, and the numbers and the lengths of
    lists. Texts may differ between hosts: names of folders. So may numbers in attributes: the rank of the process."""
    match held:
        case _ if not levels:
            yield _LEFT_OUT
        case Tensor():
            if held.layout is torch.strided and held.device.type == "cpu":
                yield held.detach()
        case np.ndarray():
            if not held.dtype.hasobject:
                yield held
        case bytes() | bytearray():
            yield np.frombuffer(held, np.uint8)
        case list() | tuple() if type(held).__getitem__ in (list.__getitem__, tuple.__getitem__):
            yield f"{len(held)} items"
            if len(held) > most:
                yield _LEFT_OUT
            for at in _spread(len(held), most):
                if isinstance(item := held[at], bool | int | float):
                    yield item
                else:
                    yield from _walk(item, levels - 1, max(most // len(held), _FEWEST_ITEMS))
        case dict():
            for name in sorted(held, key=str):
                yield from _walk(held[name], levels - 1, most)
        case _ if hasattr(type(held), "__getitem__"):
            for _, value in sorted(getattr(held, "__dict__", {}).items()):
                yield from _walk(value, levels - 1, most)


def _spread(length: int, most: int) -> Iterator[int]:
    """Up to `most` of the positions in a list, evenly spread, the first and the last among them."""
    count = min(length, most)
    return (at * (length - 1) // max(count - 1, 1) for at in range(count))


def _parts(array: Array, budget: int) -> Iterator[Array]:
    """All of an array, or blocks along its first axis, together of about `budget` bytes."""
    if array.nbytes <= max(budget, _BLOCKS):
        yield array
        return
    blocks = min(len(array), _BLOCKS)
    rows = budget * len(array) // (blocks * array.nbytes)
    for start in _spread(len(array) - max(rows, 1) + 1, blocks):
        yield from [array[start : start + rows]] if rows else _parts(array[start], budget // blocks)


def _bytes(array: Array) -> bytes:
    if isinstance(array, Tensor):
        array = array.contiguous().reshape(-1).view(torch.uint8).numpy()
    return array.tobytes()
