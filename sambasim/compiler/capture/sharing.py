"""Memory that tensors share since the user's code has assigned one to `.data` of another. A graph copies it, which is
the same until one of them changes, or a view of what the other was before is read."""

from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


def is_dense(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.layout is torch.strided


def storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def kept_address(tensor: Tensor) -> Any:
    """While this lives, nothing else gets the address of its storage, though that may be gone."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # torch gives it no types


def _holders(storage: int) -> int:
    """How many tensors have it."""
    return torch._C._storage_Use_Count(storage)


class Sharing:
    """In one call. `storages`: those of tensors that were there before."""

    def __init__(self, storages: Iterable[int]) -> None:
        self._before = {storage: _holders(storage) for storage in storages}
        self._given: dict[int, set[int]] = {}  # by storage that was given away, those that have a copy of it instead
        self._left: set[int] = set()  # that a tensor had before
        self._alive: list[object] = []

    def begins(self, tensor: Tensor, value: Tensor, fits: bool, saved: int) -> bool:
        """Whether `tensor`, which is given the memory of `value`, is to have a copy of that instead: if it `fits`, and
        nothing but the `saved` copies has its own memory."""
        own, given = storage_of(tensor), storage_of(value)
        is_copied = fits and _holders(own) == self._before[own] + saved
        self._alive += [kept_address(tensor), kept_address(value)]
        for copies in self._given.values():
            copies.discard(own)
        self._given.setdefault(given, set()).update({own} if is_copied else ())
        self._left.update(() if is_copied or own == given else {own})
        return is_copied

    def shows(self, read: Iterable[Tensor], changed: Iterable[Tensor], source: object) -> bool:
        """Whether an operator that reads and changes these makes a difference. `source`: what a copy reads."""
        if not self._given:
            return False
        given, was = self._given, storage_of(source) if is_dense(source) else 0
        for own in map(storage_of, filter(is_dense, changed)):
            if own in given and (given[own] or _holders(own) > 1):
                return True
            if any(
                own in copies and one != was and (len(copies) > 1 or _holders(one)) for one, copies in given.items()
            ):
                return True
        return not self._left.isdisjoint(map(storage_of, filter(is_dense, read)))
