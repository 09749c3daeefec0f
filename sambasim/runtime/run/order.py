"""The order of the samples in each epoch: the same on all ranks.

Torch's DistributedSampler gives it, or a sampler or a batch sampler of the user: then it is that of a loop of plain
PyTorch over the same DataLoader, epoch after epoch, if the sampler has a generator of its own, and else a function of
the run's seed and the epoch.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data.distributed import DistributedSampler

from sambasim.data import loaders
from sambasim.data.datasets import WatchedDataset
from sambasim.data.user_code import guarded, summary
from sambasim.errors import DataError
from sambasim.runtime.machine.process import Stream, derive, seed_everything


class Order:
    """The positions of `dataset` in each epoch, or with `of_batches` those of each batch. A sampler of the user is
    copied: a run leaves it as it was, and each replica of an emulation draws alike."""

    def __init__(self, dataset: WatchedDataset, seed: int, *, shuffle: bool) -> None:
        self._dataset, self._seed = dataset, seed
        loader, self.of_batches, self._drawn, self._order = dataset.loader, False, 0, list[Any]()
        if loader is None or not dataset.is_sampled:
            is_random = shuffle if loader is None else loaders.shuffles(loader)
            # With one replica it yields the whole order of the epoch.
            self._sampler: Any = DistributedSampler(dataset, 1, 0, shuffle=bool(is_random), seed=seed)
            return
        self.of_batches = loader.batch_size is None
        held = loader.batch_sampler if self.of_batches else loader.sampler, loader.generator
        try:
            self._sampler, self._generator = copy.deepcopy(held, {id(loader.dataset): loader.dataset})
        except Exception as raised:
            what = f"the {type(held[0]).__name__} of {dataset.name} cannot be copied: {summary(raised)}"
            raise DataError(what, remedy="a class with __iter__, which gives the indices of an epoch") from raised
        self._redraws = not loader.persistent_workers
        if isinstance(self._sampler, DistributedSampler):  # its part of the data would be cut again
            size = len(dataset)
            vars(self._sampler).update(num_replicas=1, rank=0, num_samples=size, total_size=size)

    def begin(self, epoch: int) -> Sequence[Any]:
        """Collective in effect: all ranks draw alike. Calls what has a `set_epoch`. Raises DataError for indices that
        the data does not have."""
        _set_epoch(self._dataset.dataset, epoch)
        if not self._dataset.is_sampled:
            _set_epoch(self._sampler, epoch)
            return list(self._sampler)
        who = f"the {type(self._sampler).__name__} of {self._dataset.name}"
        while self._drawn <= epoch:  # a generator of the user's goes on from epoch to epoch
            seed_everything(derive(self._seed, 0, self._drawn, 0, Stream.ORDER))
            for one in (self._sampler, getattr(self._sampler, "sampler", None)):
                _set_epoch(one, self._drawn)
            if self._generator is not None and (self._redraws or not self._drawn):
                torch.empty((), dtype=torch.int64).random_(generator=self._generator)  # as DataLoader, for its workers
            before, self._order = len(self._order), guarded(self._draw, who, DataError)
            self._drawn += 1
            flat = [index for batch in self._order for index in batch] if self.of_batches else self._order
            if wrong := next((index for index in flat if not 0 <= index < len(self._dataset)), None):
                raise DataError(f"{who} gives the index {wrong}, and there are {len(self._dataset)} samples")
            if self._drawn > 1 and len(self._order) != before:
                what = f"{who} gives {len(self._order)} in epoch {self._drawn}, and {before} in the first"
                raise DataError(what, remedy="let it give as many in each epoch")
        return self._order

    def _draw(self) -> list[Any]:
        if not self.of_batches:
            return [int(index) for index in self._sampler]
        order = [[int(index) for index in batch] for batch in self._sampler]
        if order and len(order[-1]) < len(order[0]):
            order.pop()  # the last of an epoch is smaller, without drop_last
        return order


def samples_of(dataset: WatchedDataset, batch_size: int, seed: int) -> int:
    """Those of an epoch; 0 for a stream without a length."""
    if not dataset.is_sampled:
        return len(dataset)
    order = Order(dataset, seed, shuffle=False)
    return len(order.begin(0)) * (batch_size if order.of_batches else 1)


def evaluation_order(dataset: WatchedDataset) -> Sequence[int]:
    """That of the data, or what a sampler of the user gives first, without batches."""
    if not dataset.is_sampled:
        return range(len(dataset))
    order = Order(dataset, 0, shuffle=False)
    first = order.begin(0)
    return [index for batch in first for index in batch] if order.of_batches else first


def _set_epoch(of: object, epoch: int) -> None:
    if callable(method := getattr(of, "set_epoch", None)):
        guarded(lambda: method(epoch), f"set_epoch of {type(of).__name__}", DataError)
