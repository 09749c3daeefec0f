"""The order of the samples in each epoch: the same on all ranks.

Torch's DistributedSampler gives it, or a sampler or a batch sampler of the user: then it is that of a loop of plain
PyTorch over the same DataLoader, epoch after epoch, if the sampler has a generator of its own, and else a function of
the run's seed and the epoch.
"""

import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from sambasim.data import loaders
from sambasim.data.batches import values_of
from sambasim.data.datasets import WatchedDataset
from sambasim.data.user_code import guarded, set_epoch
from sambasim.errors import DataError
from sambasim.runtime.machine.process import Stream, derive, seed_everything

_BY_LENGTH, _ALIKE = 1024, 64
"""So many samples are sorted by length, and stay so many together, in pieces whose order is random: as batches by
`group_by_length` of transformers' Trainer, but a run can be resumed with batches of another size."""


class Order:
    """The positions of `dataset` in each epoch, `by_length` if batches are to have samples of similar lengths. A
    sampler of the user is copied: a run leaves it as it was, and each replica of an emulation draws alike. A batch
    sampler must give batches of `batch_size`, but for 0."""

    def __init__(
        self,
        dataset: WatchedDataset,
        seed: int = 0,
        batch_size: int = 0,
        *,
        shuffle: bool = False,
        by_length: bool = False,
    ) -> None:
        self._dataset, self._seed, self._size, self._by_length = dataset, seed, batch_size, False
        self._lengths: list[int] = []
        loader, self._of_batches, self._drawn, self._order = dataset.loader, False, 0, list[int]()
        if loader is None or not dataset.is_sampled:
            is_random = shuffle if loader is None else loaders.shuffles(loader)
            self._by_length = by_length and bool(is_random)
            # With one replica it yields the whole order of the epoch.
            self._sampler: Any = DistributedSampler(dataset, 1, 0, shuffle=bool(is_random), seed=seed)
            return
        self._of_batches = loader.batch_size is None
        held = loader.batch_sampler if self._of_batches else loader.sampler, loader.generator
        self._who = f"the {type(held[0]).__name__} of {dataset.name}"
        self._sampler, self._generator = guarded(
            lambda: copy.deepcopy(held, {id(loader.dataset): loader.dataset}),
            f"a copy of {self._who}",
            DataError,
            remedy="a class with __iter__, which gives the indices of an epoch",
        )
        self._redraws = not loader.persistent_workers
        if isinstance(self._sampler, DistributedSampler):  # its part of the data would be cut again
            size = len(dataset)
            vars(self._sampler).update(num_replicas=1, rank=0, num_samples=size, total_size=size)

    def begin(self, epoch: int) -> Sequence[int]:
        """Collective in effect: all ranks draw alike. Calls what has a `set_epoch`. Raises DataError for indices that
        the data does not have."""
        if self._by_length and not self._lengths:
            self._lengths = [self._length(at) for at in range(len(self._dataset))]
        set_epoch(self._dataset.dataset, epoch)
        if not self._dataset.is_sampled:
            set_epoch(self._sampler, epoch)
            order = list(self._sampler)
            if not self._by_length:
                return order
            pieces: list[Sequence[int]] = []
            for start in range(0, len(order), _BY_LENGTH):
                ordered = sorted(order[start : start + _BY_LENGTH], key=self._lengths.__getitem__)
                alike = [ordered[at : at + _ALIKE] for at in range(0, len(ordered), _ALIKE)]
                random.Random(derive(self._seed, 0, epoch, start, Stream.ORDER)).shuffle(alike)
                pieces += alike
            return [at for piece in pieces for at in piece]
        while self._drawn <= epoch:  # a generator of the user's goes on from epoch to epoch
            seed_everything(derive(self._seed, 0, self._drawn, 0, Stream.ORDER))
            for one in (self._sampler, getattr(self._sampler, "sampler", None)):
                set_epoch(one, self._drawn)
            if self._generator is not None and (self._redraws or not self._drawn):
                torch.empty((), dtype=torch.int64).random_(generator=self._generator)  # as DataLoader, for its workers
            before, self._order = len(self._order), guarded(lambda: [*self._draw()], self._who, DataError)
            if not self._order and not before:
                raise DataError(f"{self._who} gives no samples", remedy="let it give the indices of an epoch")
            self._drawn += 1
            if wrong := next((index for index in self._order if not 0 <= index < len(self._dataset)), None):
                raise DataError(f"{self._who} gives the index {wrong}, and there are {len(self._dataset)} samples")
            if self._drawn > 1 and len(self._order) != before:
                what = f"{self._who} gives {len(self._order)} in epoch {self._drawn}, and {before} in the first"
                raise DataError(what, remedy="let it give as many in each epoch")
        return self._order

    def _length(self, index: int) -> int:
        seed_everything(derive(self._seed, 0, 0, index, Stream.ORDER))  # on all ranks alike, also of random samples
        values = (value for _, value in values_of(self._dataset[index]))
        return max((len(value) for value in values if isinstance(value, Tensor | np.ndarray) and value.ndim), default=0)

    def _draw(self) -> Iterator[int]:
        if not self._of_batches:
            yield from map(int, self._sampler)
            return
        size, is_last = self._size, False
        for batch in self._sampler:
            if size and (is_last or len(batch) > size):
                what = f"{self._who} gives batches of other sizes, and the PEF takes {size} of a replica"
                raise DataError(what, remedy=f"batches of {size}, of which the last may be smaller")
            is_last = len(batch) < size
            yield from map(int, batch)

    def dealt(self, epoch: int, used: int, rank: int, replicas: int) -> Sequence[int]:
        """Those of the whole batches of replica `rank`, after the first `used` of all."""
        left, size, of_all = self.begin(epoch)[used:], self._size, self._size * replicas
        end = len(left) // of_all * of_all
        if not self._of_batches:
            return left[rank:end:replicas]
        return [index for first in range(rank * size, end, of_all) for index in left[first : first + size]]


def first_order(dataset: WatchedDataset, seed: int = 0, batch_size: int = 0) -> Sequence[int]:
    """That of the data, or what a sampler of the user gives first; nothing of a stream without a length."""
    return Order(dataset, seed, batch_size).begin(0) if dataset.is_sampled else range(len(dataset))
