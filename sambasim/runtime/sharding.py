"""The training data of one replica: its shard, its batches, its randomness.

Each epoch, torch's DistributedSampler deals the samples out: shuffled by seed and epoch, equally many to each replica,
no sample to two. What does not divide evenly is left out; `plan` counts it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from sambasim.data.batches import Batch, bind, check, collate
from sambasim.data.samples import reading_batch
from sambasim.data.tensor_batches import tensor_batches
from sambasim.errors import InternalError
from sambasim.options.data import DataOptions
from sambasim.options.inputs import InputSpec
from sambasim.runtime.randomness import Stream, derive, seed_everything


class Shard:
    """The batches of replica `rank` of `world_size`, by input name, checked against what the graph takes in."""

    def __init__(
        self,
        dataset: Dataset[object],
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        options: DataOptions,
        inputs: Sequence[InputSpec],
        seed: int,
    ) -> None:
        self._name = options.source or "the data"
        self._rank = rank
        self._seed = seed
        self._inputs = inputs
        self._names = tuple(spec.name for spec in inputs)
        self._batch_size = batch_size
        self._workers = options.workers
        self._sampler: DistributedSampler[int] = DistributedSampler(
            dataset, num_replicas=world_size, rank=rank, shuffle=options.shuffle, seed=seed, drop_last=True
        )
        # The loader seeds its workers from a generator; without one of its own it would draw from the global one.
        self._generator = torch.Generator()
        self._loader: DataLoader[object] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self._sampler,
            drop_last=True,
            collate_fn=collate,
            num_workers=options.workers,
            prefetch_factor=options.prefetch_factor,
            persistent_workers=options.persistent_workers,
            worker_init_fn=_worker_seeder(seed, rank) if options.workers else None,
            generator=self._generator,
        )
        self._tensors = None if options.workers else tensor_batches(dataset)
        self._iterator: Iterator[Batch] = iter(())
        self._checked = False

    def begin_epoch(self, epoch: int) -> None:
        """Deal the samples out anew."""
        self._sampler.set_epoch(epoch)
        if self._tensors is not None:
            order = list(self._sampler)
            self._iterator = self._tensors.batches(order, self._batch_size)
            return
        self._generator.manual_seed(derive(self._seed, self._rank, epoch, 0, Stream.WORKER))
        self._iterator = iter(self._loader)

    def next_batch(self, step: int, micro_step: int) -> Mapping[str, Tensor]:
        """The next batch of this epoch. Raises DataError if the data does not fit the graph or cannot be read."""
        if self._tensors is not None and self._checked:
            return dict(zip(self._names, self._next_tensors(), strict=True))
        if self._tensors is None:  # otherwise nobody draws
            seed_everything(derive(self._seed, self._rank, step, micro_step, Stream.DATA))
        with reading_batch(self._name):
            batch = next(self._iterator)
        tensors = bind(batch, self._names)
        checked = check(tensors, self._inputs, self._batch_size)
        # All batches of plain tensors are alike: once one has passed as it is, the others do.
        self._checked = all(checked[name] is tensors[name] for name in self._names)
        return checked

    def _next_tensors(self) -> Sequence[Tensor]:
        batch = next(self._iterator)
        if not isinstance(batch, list):
            raise InternalError(f"a batch of tensors is a {type(batch).__name__}")
        return batch


def _worker_seeder(seed: int, rank: int) -> Callable[[int], None]:
    def seed_worker(worker: int) -> None:
        base = torch.initial_seed() % 2**32  # differs by epoch: it comes from the loader's generator
        seed_everything(derive(seed, rank, base, worker, Stream.WORKER))

    return seed_worker
