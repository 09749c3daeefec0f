"""The training data of one replica: its shard, its batches, its randomness.

Each epoch, torch's DistributedSampler puts the samples into an order, by seed and epoch. They are dealt out from it one
by one, equally many to each replica, no sample to two. What does not divide evenly is left out; `plan` counts it. So
what all replicas together have used after some steps is the beginning of that order, and a run that goes on from there,
with whatever number of replicas, deals out the rest.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from sambasim.data.batches import Batch, bind, check, collate
from sambasim.data.samples import Samples, WatchedDataset
from sambasim.data.tensor_batches import tensor_batches
from sambasim.data.workers import batches_of
from sambasim.errors import InternalError
from sambasim.options.grammar import InputSpec
from sambasim.options.training import DataOptions
from sambasim.runtime.randomness import Stream, derive, seed_everything

_Draw = list[int]
"""One batch to be read: first what the generators are set to before, then the positions of its samples."""


class Shard:
    """The batches of replica `rank` of `world_size`, by input name, checked against what the graph takes in.

    Of each step it has `accumulation_steps` batches.
    """

    def __init__(
        self,
        dataset: WatchedDataset,
        *,
        rank: int,
        world_size: int,
        batch_size: int,
        accumulation_steps: int,
        options: DataOptions,
        inputs: Sequence[InputSpec],
        seed: int,
    ) -> None:
        self._name = options.source or "the data"
        self._inputs = inputs
        self._names = tuple(spec.name for spec in inputs)
        self.accumulation_steps = accumulation_steps
        self._batch_size = batch_size
        self._deal = _Deal(dataset, rank, world_size, batch_size, accumulation_steps, seed, shuffle=options.shuffle)
        # The loader seeds its workers from a generator; without one of its own it would draw from the global one.
        self._generator = Generator()
        self._loader: DataLoader[object] = DataLoader(
            _Seeded(dataset),
            batch_sampler=self._deal,
            collate_fn=collate,
            num_workers=options.workers,
            prefetch_factor=options.prefetch_factor,
            persistent_workers=options.persistent_workers,
            generator=self._generator,
        )
        self._tensors = None if options.workers else tensor_batches(dataset)
        self._iterator: Iterator[Batch] = iter(())
        self._checked = False
        self._given = 0
        self._numbers = dataset.chosen

    def begin_epoch(self, epoch: int, step: int, used: int = 0) -> None:
        """Deal the samples out anew: those behind the first `used` of the epoch's order. `step` is the number of the
        optimizer step that comes next, from 0."""
        self._given = 0
        self._deal.begin(epoch, step, used)
        if self._tensors is not None:
            self._iterator = self._tensors.batches(self._deal.own, self._batch_size)
            return
        self._generator.manual_seed(self._deal.derive(epoch, 0, Stream.WORKER))
        self._iterator = batches_of(self._loader, self._name)

    def next_batch(self) -> Mapping[str, Tensor]:
        """The next batch of this epoch. Raises DataError if the data does not fit the graph or cannot be read."""
        self._given += 1
        if self._tensors is not None and self._checked:
            return dict(zip(self._names, self._next_tensors(), strict=True))
        tensors = bind(next(self._iterator), self._names)
        checked = check(tensors, self._inputs, self._batch_size)
        # All batches of plain tensors are alike: once one has passed as it is, the others do.
        self._checked = all(checked[name] is tensors[name] for name in self._names)
        return checked

    def samples_of_last_batch(self) -> Sequence[int]:
        """The numbers, in the user's data set, of the samples in the batch that `next_batch` gave last."""
        after = self._given * self._batch_size
        return [self._numbers[position] for position in self._deal.own[after - self._batch_size : after]]

    def _next_tensors(self) -> Sequence[Tensor]:
        batch = next(self._iterator)
        if not isinstance(batch, list):
            raise InternalError(f"a batch of tensors is a {type(batch).__name__}")
        return batch


class _Deal:
    """The batches of one replica in one epoch, for a DataLoader. `own` are the positions of its samples."""

    def __init__(
        self,
        dataset: WatchedDataset,
        rank: int,
        world_size: int,
        batch_size: int,
        accumulation_steps: int,
        seed: int,
        *,
        shuffle: bool,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._batch_size = batch_size
        self._accumulation_steps = accumulation_steps
        self._seed = seed
        # One replica that gets everything: what it gives is the order from which all are dealt their samples.
        self._order: DistributedSampler[int] = DistributedSampler(
            dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=seed
        )
        self._step = 0
        self.own: Sequence[int] = ()

    def begin(self, epoch: int, step: int, used: int) -> None:
        """As `Shard.begin_epoch`."""
        self._order.set_epoch(epoch)
        left = list(self._order)[used:]
        each = len(left) // self._world_size
        self.own = left[self._rank : each * self._world_size : self._world_size]
        self._step = step

    def derive(self, step: int, micro_step: int, stream: Stream) -> int:
        """What a generator of this replica is set to."""
        return derive(self._seed, self._rank, step, micro_step, stream)

    def __len__(self) -> int:
        return len(self.own) // self._batch_size

    def __iter__(self) -> Iterator[_Draw]:
        for index in range(len(self)):
            step, micro_step = divmod(index, self._accumulation_steps)
            first = index * self._batch_size
            seed = self.derive(self._step + step, micro_step, Stream.DATA)
            yield [seed, *self.own[first : first + self._batch_size]]


class _Seeded(Dataset[object]):
    """`dataset`, read in batches, before each of which all generators are set, whoever reads it."""

    def __init__(self, dataset: WatchedDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, draw: _Draw) -> Samples:
        seed, *positions = draw
        seed_everything(seed)
        return self._dataset.__getitems__(positions)

    def __getitem__(self, index: int) -> object:
        raise InternalError(f"sample {index} is read by itself, without a seed")
