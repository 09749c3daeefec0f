"""One replica: a copy of the model and its training steps on its own shard of the data.

Each epoch has an order, see `Order`; replica r of R gets samples r, r + R, … of it, or such batches of a batch sampler.
So the samples that all replicas have used are its beginning, and a resumed run distributes the rest, at any number of
replicas.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from torch import Generator, Tensor
from torch.utils.data import Dataset

from sambasim.data import batches
from sambasim.data.buckets import Shapes
from sambasim.data.datasets import Samples, WatchedDataset, tensor_batches
from sambasim.data.workers import batches_of, loader_of
from sambasim.errors import DataError, InternalError, PefError
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.options.grammar import InputSpec
from sambasim.options.schedules import ArgumentOptions
from sambasim.options.training import DataOptions, TrainingOptions
from sambasim.pef.archive import COMPILE_AGAIN
from sambasim.records.trace import Track
from sambasim.runtime.engine.executor import IN_MEMORY, Batch, Executor, Steps, tangent_of
from sambasim.runtime.engine.update import Update, Updated
from sambasim.runtime.machine.process import Stream, derive, seed_everything, seed_torch
from sambasim.runtime.run.order import Order
from sambasim.runtime.run.streams import Dealt, State
from sambasim.runtime.transports.connect import Transport
from sambasim.runtime.values.memory import DeviceMemory, TensorOf
from sambasim.runtime.values.optimizers import Optimizers, take_into
from sambasim.runtime.watch.observer import StepObserver, report_spans, span

if TYPE_CHECKING:
    from sambasim.runtime.engine.inductor import Inductor

_SeededBatch = list[int]
ENDED = 1 << 16
"""Added to what a rank asks of the run if its epoch has ended; above the numbers of signals."""


@dataclass(eq=False)
class Shard:
    """The batches of replica `rank` of `world_size`, by input name, checked; `accumulation_steps` in each step."""

    dataset: WatchedDataset
    rank: int
    world_size: int
    batch_size: int
    accumulation_steps: int
    options: DataOptions
    shapes: Shapes
    seed: int

    def __post_init__(self) -> None:
        self._names, self._several = tuple(spec.name for spec in self.shapes.inputs[0]), len(self.shapes.inputs) > 1
        self.graph = 0
        """The number of the graph that the next batches are for."""
        by_length = self._several and self.options.shuffle
        self._order = Order(self.dataset, self.seed, self.batch_size, shuffle=self.options.shuffle, by_length=by_length)
        self._own: Sequence[int] = ()  # positions of the samples in this replica's batches of this epoch
        self._next_step = 0  # of the first batch of this epoch
        # The loader seeds its workers from a generator; without one of its own it would draw from the global one.
        self._generator = Generator()
        self._dealt = (
            Dealt(self.dataset, self.rank, self.world_size, self.batch_size, self.seed)
            if self.dataset.is_stream
            else None
        )
        self._ahead: list[Any] = []  # the batches of the next step, where they are read before it
        self.state: State = {}  # of the stream, after the last batch
        read, sampler = (Seeded(self.dataset), self) if self._dealt is None else (self._dealt, None)
        self._loader = loader_of(read, sampler, self.options, self._generator, self.dataset)
        if self._dealt is not None and (workers := self._loader.num_workers) > 1:
            what = f"{self.dataset.name} is a stream, which {workers} workers would read in another order"
            raise DataError(what, remedy="--workers 1, or num_workers=1 of the DataLoader")
        if self._loader.persistent_workers and hasattr(self.dataset.dataset, "set_epoch"):
            what = f"{self.dataset.name} has a set_epoch, which workers that are kept would not see"
            raise DataError(what, remedy="--set data.persistent_workers=false, or that of the DataLoader")
        # A TensorDataset is cut without the loader; None if it is none.
        self._tensors = None if self._loader.num_workers or self._several else tensor_batches(self.dataset)
        self._iterator: Iterator[batches.Batch] = iter(())
        self._all_fit = False  # a batch of _tensors fits the inputs, so the others do too
        self._batches = 0  # read in this epoch
        self.dropped: str | None = None
        """The columns of samples that the graph does not take, once a batch was read."""

    def begin_epoch(self, epoch: int, step: int, used: int = 0, streams: Sequence[State] = ()) -> None:
        """Distribute the samples after the first `used` of the epoch's order. `step` is the next optimizer step.
        `streams`: the states of a stream, by replica, from a checkpoint."""
        self._batches, self._next_step = 0, step
        self._generator.manual_seed(derive(self.seed, self.rank, epoch, 0, Stream.WORKER))
        if self._dealt is not None:
            self._dealt.begin(epoch, used, streams)
        else:
            self._own = self._order.dealt(epoch, used, self.rank, self.world_size)
        if self._tensors is not None:
            self._iterator = self._tensors(self._own, self.batch_size)
        else:
            self._iterator = iter(())  # ends the workers of the epoch before, if they are not kept, before others start
            self._iterator = batches_of(self._loader, self.dataset.name)
        if self.read_ahead():
            who = f"replica {self.rank} of {self.world_size}"
            what = f"{self.dataset.name} gives {who} no whole step in epoch {epoch + 1}"
            raise DataError(what, remedy="more samples, in as many shards as replicas at least, or a smaller batch")

    def close(self) -> None:
        """End the processes that read ahead. The garbage collector would wait 5 s for each of them."""
        self._iterator = iter(())
        self._loader._iterator = None  # of workers that are kept

    def __iter__(self) -> Iterator[_SeededBatch]:
        """The batches of the current epoch, as the sampler of its loader."""
        for index in range(len(self._own) // self.batch_size):
            step, micro_step = divmod(index, self.accumulation_steps)
            seed = derive(self.seed, self.rank, self._next_step + step, micro_step, Stream.DATA)
            yield [seed, *self._positions(index)]

    def read_ahead(self) -> bool:
        """Whether the epoch ends here, as a stream has no whole step left."""
        if self._dealt is None:
            return False
        self._ahead = list(islice(self._iterator, self.accumulation_steps))
        is_failure = bool(self._ahead) and isinstance(self._ahead[-1][0], DataError)
        return len(self._ahead) < self.accumulation_steps and not is_failure

    def graph_of_step(self) -> int:
        """The number of the first graph that takes all batches of the next step."""
        if self._dealt is None:
            self._ahead = list(islice(self._iterator, self.accumulation_steps))
        found = 0
        for read in self._ahead:
            with suppress(DataError):  # `next_batch` raises it
                bound = batches.bind(read if self._dealt is None else read[0], self._names)
                found = max(found, self.shapes.first_for(bound))
        return found

    def next_batch(self) -> Mapping[str, Tensor]:
        """The next batch of this epoch. Raises DataError if the data does not fit the graph or cannot be read."""
        self._batches += 1
        if self._all_fit:
            values: Any = next(self._iterator)
            return {name: values[at] for at, name in enumerate(self._names)}  # zip takes twice as long
        if self._dealt is not None:
            batch, self.state = self._ahead.pop(0)
        else:
            batch = self._ahead.pop(0) if self._several else next(self._iterator)
        tensors = batches.bind(batch, self._names)
        if self.dropped is None:
            named = dict(batches.values_of(batch)) if isinstance(batch, Mapping) else {}
            self.dropped = ", ".join(name for name in named if name not in tensors)
        if self._several:
            tensors = self.shapes.padded(tensors, self.graph)
        checked = batches.check(tensors, self.shapes.inputs[self.graph], self.batch_size)
        # All batches of plain tensors have the same types: if one passes unchanged, all do.
        self._all_fit = self._tensors is not None and all(checked[name] is tensors[name] for name in self._names)
        return checked

    def samples_of_last_batch(self) -> Sequence[int]:
        """The indices, in the user's dataset, of the samples in the last batch of `next_batch`."""
        return [self.dataset.chosen[position] for position in self._positions(self._batches - 1)]

    def _positions(self, batch: int) -> Sequence[int]:
        return self._own[batch * self.batch_size : (batch + 1) * self.batch_size]


class Seeded(Dataset[object]):
    """`dataset`, read in batches; all generators are seeded before each, in this process or a worker."""

    def __init__(self, dataset: WatchedDataset) -> None:
        self._dataset = dataset

    def __getitems__(self, draw: _SeededBatch) -> Samples:
        seed, *positions = draw
        seed_everything(seed)
        return self._dataset.__getitems__(positions)


class Replica:
    """The rank of `transport`, a replica or part of one. `shard`: None for a parameter server without a replica.
    `overlaps`: communication may overlap with the backward. `skips_nonfinite`: skip a step if a loss is not finite.
    `graphs`: all of the PEF, with the tensors of each by symbol, of which the last is that of `transport`."""

    def __init__(
        self,
        transport: Transport,
        shard: Shard | None,
        training: TrainingOptions,
        optimizers: Optimizers,
        engine: "Inductor | None" = None,
        *,
        overlaps: bool = True,
        skips_nonfinite: bool = False,
        observer: StepObserver | None = None,
        graphs: Sequence[tuple[Program, TensorOf]] = (),
    ) -> None:
        program, memory = transport.program, transport.memory
        if program.loss is None:
            raise InternalError("a replica of a program without a loss")
        self.rank = transport.rank
        self.replica = transport.replica  # ranks of one replica read the same data and draw the same numbers
        self.memory, self.transport, self.optimizers = memory, transport, optimizers
        self.observer: StepObserver | None = None
        self._detailed: StepObserver | None = None  # the same, if it wants details
        self.shard = shard
        self._reader = iter(shard.next_batch, None) if shard is not None else iter(())
        self._stream = shard if shard is not None and shard.dataset.is_stream else None
        self.works = shard is not None
        """Whether it computes gradients; False for a parameter server without a replica."""
        self._seed, self._micro_steps = training.seed, training.accumulation_steps
        self._program, self._loss, self._count = program, program.loss, program.count
        self._told = (program.loss, *program.logged.values())
        self.loss_dtype = program.symbols[self._loss].type.dtype
        self._batches = program.micro_batches  # of a pass
        is_placed = program.schedule is None  # otherwise each micro-batch brings its inputs
        graphs = graphs or [(program, memory.tensor)]
        names = program.names_of(SymbolKind.INPUT)
        self._inputs = [{name: tensor_of(name) for name in names} if is_placed else None for _, tensor_of in graphs]
        wanted = tuple(filter(None, (*self._told, program.count)))
        waited_s: dict[str, float] = defaultdict(float)
        self._executors = [
            Executor(of.step, of, tensor_of, engine, wanted, transport=transport, observer=observer, waited_s=waited_s)
            for of, tensor_of in graphs
        ]
        self.executor = self._executors[-1]
        """Of the graph of this step, if a step has begun."""
        self._graph = len(graphs) - 1
        self._update = Update(self.executor, transport, optimizers, overlaps=overlaps and not skips_nonfinite)
        self._draws = self.executor.draws_random_numbers
        changed = [memory.tensor(symbol.name) for symbol in changed_buffers(program)]
        self._guarded = [(buffer, buffer.clone()) for buffer in changed] if skips_nonfinite else None
        """The buffers that a pass changes, with copies, to undo a skipped step."""
        self._averages = [(memory.tensor(to), memory.tensor(of)) for of, to in program.buffer_averages.items()]
        self._tangents: dict[float, Tensor | None] = {}

    def observe(self, observer: StepObserver | None) -> None:
        self.observer = observer
        for executor in self._executors:
            executor.observer = observer
        self._detailed = observer if observer is not None and observer.detailed else None
        report_spans(self, observer, self.rank)
        self._update.observe(observer)

    def read_ahead(self) -> int:
        """The number of the graph that the next step needs; of a parameter server the first."""
        if self.observer is not None:
            self.observer.batch_begins(self.rank, 0)
        return 0 if self.shard is None else self.shard.graph_of_step()

    def use_graph(self, number: int) -> None:
        """In the next steps."""
        self._graph, self.executor = number, self._executors[number]
        if self.shard is not None:
            self.shard.graph = number

    def step(self, step: int, update: int, rate: float, loss_scale: float, ask: Callable[[], int]) -> Steps[Updated]:
        """Run step `step` (from 0) with optimizer step `update` (from 1, without skipped ones); `rate` multiplies
        learning rates, `loss_scale` the loss. `ask` is called after the passes: what this rank asks of the run."""
        if self._guarded is not None:
            for buffer, kept in self._guarded:
                kept.copy_(buffer)
            self.transport.sync.wait_for_readers()
        else:
            self._update.begin_step(update, rate, loss_scale)
        began_ns, observer, counted = perf_counter_ns(), self.observer, 0.0
        totals: list[float] = []
        micro_steps, count = self._micro_steps, self._batches
        parts = micro_steps * count
        overlapping = self._update.overlapping if self._graph == len(self._executors) - 1 else ()
        if not overlapping or parts > 1 or self._program.schedule is not None:  # else sections wait for what they read
            self.transport.sync.settle()
        scale = loss_scale / parts  # so gradients add up to that of the mean, scaled
        if scale not in self._tangents:
            self._tangents[scale] = tangent_of(self._program, scale)
        for micro_step in range(micro_steps if self.works else 0):
            outputs = yield from self.executor.run(
                self._tangents[scale],
                self._next_batches(micro_step),
                partial(self._seed_pass, step, micro_step * count) if self._draws else None,
                accumulate=micro_step > 0,
                last=micro_step == micro_steps - 1,
                overlapping=overlapping,
            )
            for of_batch in outputs:
                last = []
                for name in self._told:  # a comprehension takes 0.3 µs more
                    last.append(float(of_batch[name]) if name in of_batch else math.nan)
                totals = [total + of_last for total, of_last in zip(totals, last, strict=True)] if totals else last
                if self._count in of_batch:
                    counted += float(of_batch[self._count])
            if observer is not None:
                observer.pass_ends(self.rank, last[0])
        losses = totals if parts == 1 else [total / parts for total in totals]
        ends = ENDED if self._stream is not None and self._stream.read_ahead() else 0
        if self._detailed is not None and losses:
            self._detailed.span_ends(self.rank, Track.HOST, "forward and backward", began_ns, {})
        earlier: list[Updated] = []
        if self._count is not None:
            of_passes = [counted / parts, *losses[1:]] if self.works else []
            earlier.append((yield from self._update.run(of_passes, applies=False)))
            counts = earlier[0].losses
            mean_count = sum(counts) / len(counts) or 1.0  # without any, gradients are 0
            self.optimizers.divide_by(mean_count)
            losses = [*(loss / mean_count for loss in losses[:1]), *losses[1:]]
        if self._guarded is None:
            updated = yield from self._update.run(losses, ask() + ends, settles=False)
            return self._averaged(updated.after(earlier)) if self._averages or earlier else updated
        # The losses are exchanged before any gradient is reduced.
        exchanged = yield from self._update.run(losses, ask() + ends, applies=False)
        if not all(map(math.isfinite, exchanged.losses)):
            for buffer, kept in self._guarded:
                buffer.copy_(kept)
            return exchanged._replace(applied=False).after(earlier)
        self._update.begin_step(update, rate, loss_scale)
        updated = yield from self._update.run(losses, exchanged.request)
        return self._averaged(updated.after([*earlier, exchanged]))

    def _averaged(self, updated: Updated) -> Updated:
        for average, buffer in self._averages if updated.applied else ():
            take_into(average, buffer, self.optimizers.weight_in_average)
        return updated

    def _next_batches(self, micro_step: int) -> Sequence[Batch]:
        if self.observer is not None:
            self.observer.batch_begins(self.rank, micro_step)
        read = self._read(micro_step)
        if (inputs := self._inputs[self._graph]) is not None:
            self._place(inputs, read[0])
            read = IN_MEMORY
        if self.observer is not None:
            self.observer.pass_begins(self.rank, micro_step)
        return read

    @span(Track.HOST, "data", lambda self, micro_step: {"micro_step": micro_step})
    def _read(self, micro_step: int) -> Sequence[Batch]:
        return [next(self._reader)] if self._batches == 1 else list(islice(self._reader, self._batches))

    @span(
        Track.COPIES,
        "batch to device",
        lambda self, inputs, batch: {"bytes": sum(part.nbytes for part in batch.values())},
    )
    def _place(self, inputs: Batch, batch: Batch) -> None:
        for name, tensor in batch.items():
            inputs[name].copy_(tensor)

    def _seed_pass(self, step: int, first: int, number: int) -> None:
        """Seed the generator for micro-batch `first` + `number` of a step: the same for all ranks of a replica."""
        seed_torch(derive(self._seed, self.replica, step, first + number, Stream.GRAPH))


def changed_buffers(program: Program) -> list[Symbol]:
    """Those that a training step changes."""
    changed = [program.symbols[output.symbol] for output in (program.training.outputs if program.training else ())]
    return [symbol for symbol in changed if symbol.kind is SymbolKind.BUFFER]


def arguments_in(memory: DeviceMemory, table: Mapping[str, ArgumentOptions]) -> list[tuple[Tensor, ArgumentOptions]]:
    """What a run gives: each tensor, and how its values follow from `table`. Raises PefError for one that it lacks."""
    symbols, names = memory.program.symbols, memory.program.names_of(SymbolKind.ARGUMENT)
    if lacking := [name for name in names if name not in table or table[name].dtype != symbols[name].type.dtype]:
        raise PefError(f"the PEF does not say what its argument {lacking[0]} is", remedy=COMPILE_AGAIN)
    return [(memory.tensor(name), table[name]) for name in names]


def input_specs(program: Program) -> Sequence[InputSpec]:
    """The inputs of the program in order, for one sample each."""
    return [
        InputSpec(symbol.name, symbol.type.dtype, symbol.type.shape[1:], symbol.exclusive_bound)
        for symbol in program.symbols.values()
        if symbol.kind is SymbolKind.INPUT
    ]
