"""Data that is read in its own order: an IterableDataset, or a generator function. Every replica reads all of it and
takes its batches in turn, unless the data set splits itself: it asks torch for its worker, or is one of Hugging Face.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, islice
from typing import Any, TypeAlias

import torch.utils.data._utils.worker as of_torch
from torch.utils.data import IterableDataset

from sambasim.data.batches import Batch, collate
from sambasim.data.datasets import WatchedDataset
from sambasim.data.user_code import guarded, set_epoch
from sambasim.errors import DataError
from sambasim.runtime.machine.process import Stream, derive, seed_everything
from sambasim.units import counted

State: TypeAlias = Mapping[str, Any]
"""Of a stream after a batch: whether it is `split`, and its `state`, of a `state_dict` that JSON can hold, or None."""


class _Share:
    """What `get_worker_info()` gives while a replica reads: it is worker `rank` of as many as there are replicas. Only
    this private variable of torch reaches a name that a module has imported."""

    def __init__(self, rank: int, replicas: int, dataset: object) -> None:
        self._rank, self._replicas, self.dataset, self.seed, self.asked = rank, replicas, dataset, 0, False

    @property
    def id(self) -> int:
        self.asked = True
        return self._rank

    @property
    def num_workers(self) -> int:
        self.asked = True
        return self._replicas

    def read(self, samples: Iterator[object], count: int) -> list[object]:
        before = of_torch._worker_info
        if self._replicas > 1:
            of_torch._worker_info = self  # type: ignore[assignment]  # torch's variable is of its WorkerInfo, whose attributes this has
        try:
            return list(islice(samples, count))
        finally:
            of_torch._worker_info = before


class Dealt(IterableDataset[tuple[Batch, State]]):
    """The batches of replica `rank` in one epoch after another, each with the state of the stream after all replicas
    have read one. What the data set draws follows from `seed` and the number of the batch: alike on all replicas."""

    def __init__(self, dataset: WatchedDataset, rank: int, replicas: int, size: int, seed: int) -> None:
        self._dataset, self._rank, self._replicas, self._size, self._seed = dataset, rank, replicas, size, seed
        self._has_state = hasattr(dataset.dataset, "state_dict") and hasattr(dataset.dataset, "load_state_dict")
        # A run leaves the user's as it was, and each replica of an emulation has its own.
        self._stream: Any = dataset.dataset
        if self._has_state or replicas > 1:
            remedy = "open files and connections in __iter__"
            self._stream = guarded(
                lambda: copy.deepcopy(dataset.dataset), f"a copy of {dataset.name}", DataError, remedy
            )
        if replicas > 1 and type(self._stream).__module__.split(".")[0] == "datasets":
            from datasets.distributed import split_dataset_by_node  # type: ignore[import-not-found]  # not installed here

            self._stream, self._is_split = split_dataset_by_node(self._stream, rank, replicas), True
        else:
            self._is_split = False

    def begin(self, epoch: int, used: int, states: Sequence[State]) -> None:
        """After `used` samples of all replicas, whose states are saved."""
        self._epoch, self._used, self._states = epoch, used, states if used else ()
        set_epoch(self._stream, epoch)

    def __iter__(self) -> Iterator[tuple[Batch, State]]:
        try:
            yield from self._batches()
        except DataError as error:
            yield error, {}

    def _batches(self) -> Iterator[tuple[Batch, State]]:
        size, rank, replicas, states, used = self._size, self._rank, self._replicas, self._states, self._used
        was_split, is_same = bool(states and states[0]["split"]), len(states) == replicas
        saved = states[rank if is_same else 0]["state"] if states else None
        before = used // size
        first = 0 if saved is None else before  # what is read again, to be skipped, draws what it drew
        seed_everything(derive(self._seed, 0, self._epoch, first, Stream.DATA))
        if saved is not None:
            self._stream.load_state_dict(saved)
        share = _Share(rank, replicas, self._stream)
        samples = self._dataset.stream(self._stream)
        if saved is None or not is_same:
            samples = chain(share.read(samples, 1), samples)  # it has asked for its worker by then
        split = self._is_split or share.asked or (was_split and saved is not None)
        if states and not is_same and (split or was_split):
            earlier = counted(len(states), "replica")
            what = f"the checkpoint lies within an epoch of {self._dataset.name}, split for {earlier}"
            raise DataError(what, remedy=f"resume on {earlier}, or from the end of an epoch")
        if saved is None:
            share.read(samples, used % size)
        own: Batch = []
        for number in count(first + rank, replicas) if split else count(first):
            seed_everything(derive(self._seed, 0, self._epoch, number, Stream.DATA))
            read = share.read(samples, size)
            if len(read) < size:
                return
            replica = rank if split else (number - before) % replicas
            if number >= before and replica == rank:
                own = collate(read, self._dataset.collate)
            if number >= before and (split or replica == replicas - 1):
                yield own, {"split": split, "state": self._state()}

    def _state(self) -> Any:
        if not self._has_state:
            return None
        try:
            return json.loads(json.dumps(self._stream.state_dict()))
        except TypeError:  # a checkpoint holds JSON: its samples are skipped
            return None
