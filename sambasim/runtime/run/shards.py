"""The training data of one replica: its shard, its batches and their random seeds.

Each epoch, torch's DistributedSampler orders the samples; replica r of R gets samples r, r + R, … of that order. So the
samples that all replicas have used are its beginning, and a resumed run distributes the rest, at any number of
replicas.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from sambasim.data.batches import Batch, batches_of, bind, check, collate
from sambasim.data.datasets import Samples, WatchedDataset, tensor_batches
from sambasim.errors import InternalError
from sambasim.options.grammar import InputSpec
from sambasim.options.training import DataOptions
from sambasim.runtime.machine.determinism import Stream, derive, seed_everything

_SeededBatch = list[int]


class Shard:
    """The batches of replica `rank` of `world_size`, by input name, checked; `accumulation_steps` in each step."""

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
        self._rank, self._world_size, self._seed = rank, world_size, seed
        # With one replica it yields the whole order of the epoch.
        self._order: DistributedSampler[int] = DistributedSampler(
            dataset, num_replicas=1, rank=0, shuffle=options.shuffle, seed=seed
        )
        self._own: Sequence[int] = ()  # positions of this replica's samples in this epoch
        self._next_step = 0
        # The loader seeds its workers from a generator; without one of its own it would draw from the global one.
        self._generator = Generator()
        self._loader: DataLoader[object] = DataLoader(
            _Seeded(dataset),
            batch_sampler=_BatchSampler(self._seeded_batches),
            collate_fn=collate,
            num_workers=options.workers,
            prefetch_factor=options.prefetch_factor,
            persistent_workers=options.persistent_workers,
            generator=self._generator,
        )
        self._tensors = None if options.workers else tensor_batches(dataset)
        self._iterator: Iterator[Batch] = iter(())
        self._checked = False
        self._batches = 0
        self._indices = dataset.chosen

    def begin_epoch(self, epoch: int, step: int, used: int = 0) -> None:
        """Distribute the samples after the first `used` of the epoch's order. `step` is the next optimizer step."""
        self._batches = 0
        self._order.set_epoch(epoch)
        left = list(self._order)[used:]
        each = len(left) // self._world_size
        self._own = left[self._rank : each * self._world_size : self._world_size]
        if self._tensors is not None:
            self._iterator = self._tensors.batches(self._own, self._batch_size)
            return
        self._next_step = step
        self._generator.manual_seed(derive(self._seed, self._rank, epoch, 0, Stream.WORKER))
        self._iterator = batches_of(self._loader, self._name)

    def _seeded_batches(self) -> Iterator[_SeededBatch]:
        for index in range(len(self._own) // self._batch_size):
            step, micro_step = divmod(index, self.accumulation_steps)
            seed = derive(self._seed, self._rank, self._next_step + step, micro_step, Stream.DATA)
            first = index * self._batch_size
            yield [seed, *self._own[first : first + self._batch_size]]

    def next_batch(self) -> Mapping[str, Tensor]:
        """The next batch of this epoch. Raises DataError if the data does not fit the graph or cannot be read."""
        self._batches += 1
        batch = next(self._iterator)
        if self._tensors is not None and self._checked:
            if not isinstance(batch, list):
                raise InternalError(f"a batch of tensors is a {type(batch).__name__}")
            return dict(zip(self._names, batch, strict=True))
        tensors = bind(batch, self._names)
        checked = check(tensors, self._inputs, self._batch_size)
        # All batches of plain tensors have the same types: if one passes unchanged, all do.
        self._checked = all(checked[name] is tensors[name] for name in self._names)
        return checked

    def samples_of_last_batch(self) -> Sequence[int]:
        """The indices, in the user's dataset, of the samples in the last batch of `next_batch`."""
        after = self._batches * self._batch_size
        return [self._indices[position] for position in self._own[after - self._batch_size : after]]


class _BatchSampler:
    """The batches of the current epoch: a DataLoader keeps its sampler."""

    def __init__(self, batches: Callable[[], Iterator[_SeededBatch]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[_SeededBatch]:
        return self._batches()


class _Seeded(Dataset[object]):
    """`dataset`, read in batches; all generators are seeded before each, in this process or a worker."""

    def __init__(self, dataset: WatchedDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, draw: _SeededBatch) -> Samples:
        seed, *positions = draw
        seed_everything(seed)
        return self._dataset.__getitems__(positions)

    def __getitem__(self, index: int) -> object:
        raise InternalError(f"sample {index} is read alone, without a seed")
