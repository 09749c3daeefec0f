"""The evaluation graph on held-out samples, during a run, and `run --inference`: its outputs for a data set.

Rank r of N takes the batches r, r + N, …, so that each has the samples, and so the bits, that it has on one rank. In a
run, the running statistics are those of replica 0. The padding of the last batch is discarded.
"""

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import count as counter
from itertools import islice, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader

from sambasim.data import batches
from sambasim.data.datasets import NOTHING, Given, WatchedDataset, open_source
from sambasim.data.workers import batches_of, loader_of
from sambasim.errors import DataError, OptionError
from sambasim.ir.graph import Graph
from sambasim.ir.mesh import copy_mesh
from sambasim.ir.program import Program
from sambasim.ir.ranks import without_loss
from sambasim.ir.types import SymbolKind
from sambasim.options.given import as_table
from sambasim.options.grammar import TARGET, ignored_class
from sambasim.options.run import RunOptions, resolve_run
from sambasim.pef import map_weights, read
from sambasim.pef.digests import changed
from sambasim.records.metrics import InferenceRecord
from sambasim.runtime.checkpoint.weights import given_weights
from sambasim.runtime.engine.executor import Batch, Executor, outputs_in_order
from sambasim.runtime.machine import process
from sambasim.runtime.machine.communicator import Communicator, single_rank
from sambasim.runtime.machine.process import Stream, derive, seed_everything, seed_torch
from sambasim.runtime.metrics import Function, Metrics, Outcome
from sambasim.runtime.run.graphs import Graphs
from sambasim.runtime.run.order import first_order
from sambasim.runtime.run.replica import Seeded, arguments_in, input_specs
from sambasim.runtime.run.setup import blamed_on_strangers, check_sources, check_trusted
from sambasim.runtime.transports.connect import Transport, Way, open_ranks
from sambasim.runtime.transports.in_process import run_together
from sambasim.runtime.values.memory import DeviceMemory, TensorOf, place_weights, write_tensors
from sambasim.runtime.watch.status_file import UNWATCHED, Activity
from sambasim.units import counted

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of one rank over its samples. `loss` is of `counted` samples, or weights of counted elements; `correct`
    of `classified` elements have the right class. `logged`: of what `told_of` samples have beside the loss."""

    samples: int = 0
    loss: float = 0.0
    counted: float = 0.0
    correct: int = 0
    classified: int = 0
    told_of: int = 0
    logged: tuple[float, ...] = ()

    def __add__(self, other: "Sums") -> "Sums":
        *numbers, (logged, further) = zip(astuple(self), astuple(other), strict=True)
        sums: list[Any] = [*map(sum, numbers), tuple(map(sum, zip_longest(logged, further, fillvalue=0.0)))]
        return Sums(*sums)


class Evaluator:
    """Runs the evaluation graph of one replica, with targets and for inference, on its `ranks` in this process. `own`:
    the symbols that `use` sets, besides running statistics; `functions`: metrics by name."""

    def __init__(
        self,
        graphs: Graphs,
        ranks: Sequence[Transport],
        activity: Activity = UNWATCHED,
        own: Collection[SymbolKind] = (),
        functions: Mapping[str, Function] = MappingProxyType({}),
    ) -> None:
        program, resolved, self._shapes = graphs.program, graphs.run, graphs.shapes()
        asked = resolved.evaluation.metrics if program.loss is not None else None
        self._program, self._loss, self._options, self._activity = program, resolved.loss, resolved.data, activity
        self.metrics = Metrics(program, asked or {}, resolved.loss, functions, self._shapes.padding)
        self._has_loss = program.loss is not None
        self._hub = ranks[0].hub
        self._generators: dict[int, Tensor] = {}
        self._loaders: dict[tuple[int, int], DataLoader[object]] = {}  # to keep worker processes
        self._ranks = [[_Rank(rank, own, *graph) for graph in graphs.in_memory(rank.memory)] for rank in ranks]
        of_whole = _evaluation_graphs(program)  # not those of a stage
        self._whole = [*(rank.graphs for rank in self._ranks[0][:-1]), of_whole]

    def use(self, tensors: Sequence[Mapping[str, Tensor]]) -> None:
        """Use these running statistics, of replica 0's ranks, or parameters."""
        for graphs, own in zip(self._ranks, tensors, strict=True):
            for graph in graphs:
                graph.take(own)

    def infer(
        self, dataset: WatchedDataset, rank: int, world_size: int, seed: int
    ) -> Iterator[tuple[Sums, list[Tensor], Outcome]]:
        """For each batch of `rank`, its sums, the outputs of which it is the first axis, without padding, and what its
        metrics are of. Random numbers are a function of `seed` and the number of the batch."""
        size = self._program.batch_size
        for number, (batch, count, graph) in enumerate(self._batches(dataset, rank, world_size, seed)):
            seed_torch(derive(seed, 0, 0, rank + number * world_size, Stream.GRAPH))
            self._generators.clear()
            outputs = self._run(batch, graph)
            kept = [one[:count] for one in outputs[self._program.loss_outputs :] if one.shape[:1] == (size,)]
            found = self.metrics.of_batch(kept[0], batch, count) if kept else {}
            yield self._sums_of(outputs, batch, count, graph), kept, found

    def over(self, batches: Iterable[tuple[Sums, Outcome]]) -> dict[str, Any]:
        """What records of an evaluation and of an inference say of all samples, whose batches are in order."""
        of_batches, names = [*batches], self._program.evaluated
        total = sum((sums for sums, _ in of_batches), Sums())
        return {
            "samples": total.samples,
            "loss": total.loss / total.counted if self._has_loss and total.counted else None,
            "logged": {name: one / total.told_of for name, one in zip(names, total.logged, strict=False)},
            "accuracy": total.correct / total.classified if total.classified else None,
            "metrics": self.metrics.over(outcome for _, outcome in of_batches),
        }

    def _batches(
        self, dataset: WatchedDataset, rank: int, world_size: int, seed: int
    ) -> Iterator[tuple[Batch, int, int]]:
        """Each with the number of its samples and of its graph."""
        size = self._program.batch_size
        read: Iterator[tuple[batches.Batch, int]]

        def drawing(number: int) -> int:
            return derive(seed, 0, 0, number, Stream.DATA)

        def of_stream() -> Iterator[list[object]]:
            samples = dataset.stream()
            for number in counter():
                seed_everything(drawing(number))
                if not (one := list(islice(samples, size))):
                    return
                yield one

        if dataset.is_stream:
            own, of = islice(of_stream(), rank, None, world_size), ""
            read = ((batches.collate(one, dataset.collate), len(one)) for one in own)
        else:
            order, key = first_order(dataset), (id(dataset), rank)
            starts = range(rank * size, len(order), world_size * size)
            deal = [[drawing(start // size), *order[start : start + size]] for start in starts]
            of = f" of {len(deal)}"
            if key not in self._loaders:
                self._loaders[key] = loader_of(Seeded(dataset), deal, self._options, Generator(), dataset)
            read = zip(batches_of(self._loaders[key], dataset.name), (len(one) - 1 for one in deal), strict=False)
        for number in counter(1):
            self._activity.does(f"evaluating batch {number}{of}")
            if (found := next(read, None)) is None:
                return
            batch, count = found
            yield self._padded(batch, count)

    def _padded(self, batch: batches.Batch, count: int) -> tuple[Batch, int, int]:
        size, names = self._program.batch_size, [spec.name for spec in self._shapes.inputs[0]]
        tensors = batches.bind(batch, names, ignore_rest=not self._has_loss)
        for name, tensor in tensors.items():
            if tensor.shape[:1] != (count,):
                what = f"a batch of {counted(count, 'sample')} has {name} of shape {list(tensor.shape)}"
                raise DataError(what, remedy="make a batch of all samples, along its first axis")
            if missing := size - count:
                tensors[name] = torch.cat([tensor, tensor[:1].expand(missing, *tensor.shape[1:])])
        graph = self._shapes.first_for(tensors)
        tensors = self._shapes.padded(tensors, graph)
        return batches.check(tensors, self._shapes.inputs[graph], size), count, graph

    def _run(self, batch: Batch, graph: int, number: int = 0) -> list[Tensor]:
        """Run the executors `number` of `graph` on all ranks. Returns the outputs of the first rank that has any."""
        ranks = [graphs[graph] for graphs in self._ranks]
        for rank in ranks:
            rank.take(batch, number)
        of_ranks = run_together([rank.executors[number].run() for rank in ranks], self._hub, self._generators)
        of_first = next(filter(None, (outputs for (outputs,) in of_ranks)), {})
        return outputs_in_order(self._whole[graph][number], of_first)

    def _sums_of(self, outputs: Sequence[Tensor], batch: Mapping[str, Tensor], count: int, graph: int) -> Sums:
        """The sums over the first `count` samples of a batch, from the outputs of the graph."""
        if not self._has_loss:
            return Sums(samples=count)
        is_of_batch = not self._program.per_sample_loss
        of_batch = self._of_batch(outputs, batch, count, graph) if is_of_batch or self._program.evaluated else Sums()
        if is_of_batch or not outputs:  # another rank of the replica has them
            return of_batch
        counted, correct, classified = self._count(outputs[1:], batch, count)
        losses = float(outputs[0][:count].double().sum())
        return Sums(count, losses, counted, correct, classified, of_batch.told_of, of_batch.logged)

    def _of_batch(self, outputs: Sequence[Tensor], batch: Batch, count: int, graph: int) -> Sums:
        if count == self._program.batch_size:
            return self._mean_of(outputs, count)
        # Means over a batch with padding: run the real samples one by one, or skip them.
        total = Sums()
        for index in range(count):
            sample = {name: tensor[index : index + 1] for name, tensor in batch.items()}
            if self._program.single is not None:
                total += self._mean_of(self._run(sample, graph, 1), 1)
        return total

    def _mean_of(self, outputs: Sequence[Tensor], count: int) -> Sums:
        """From a mean, or from a sum and what it counts; nothing without outputs, which another rank has."""
        if not outputs:
            return Sums()
        logged = tuple(float(outputs[at]) * count for at in self._program.evaluated.values())
        of_loss = (float(outputs[0]), float(outputs[1])) if self._program.loss_outputs == 2 else None
        loss, counted = of_loss or (float(outputs[0].sum()) * count, count)
        return Sums(count, loss, counted, told_of=count, logged=logged)

    def _count(self, outputs: Sequence[Tensor], batch: Mapping[str, Tensor], count: int) -> tuple[float, int, int]:
        """What a sum of losses is divided by, the number of correctly classified elements, and of all; without elements
        if the loss is no classification."""
        if self._loss is None or TARGET not in batch:
            return count, 0, 0
        guess, target, args = outputs[0][:count], batch[TARGET][:count], self._loss.args
        if self._loss.name in ("cross_entropy", "nll") and not target.is_floating_point():
            counted = target[is_counted := target.ne(ignored_class(args))]
            correct, weight = int(guess.argmax(1).eq(target)[is_counted].sum()), args.get("weight")
            of_elements = counted.numel() if weight is None else float(torch.tensor(weight).double()[counted].sum())
            return of_elements, correct, counted.numel()
        if self._loss.name == "bce_with_logits":
            return count, int(guess.gt(0).eq(target.gt(0.5)).sum()), target.numel()
        return count, 0, 0


def _evaluation_graphs(program: Program) -> list[Graph]:
    return [*filter(None, (program.evaluation, program.single))]


class _Rank:
    """`program` on a rank of a replica, with inputs, running statistics and `own_kinds` of its own. `executors`: of its
    `graphs`, that of evaluation, and that at batch 1, if it has it."""

    def __init__(
        self, transport: Transport, own_kinds: Collection[SymbolKind], program: Program, tensor_of: TensorOf
    ) -> None:
        names = program.names_of(SymbolKind.BUFFER, SymbolKind.INPUT, *own_kinds)
        own = {name: torch.empty_like(tensor_of(name)) for name in names}
        sample = own | {name: own[name][:1].clone() for name in program.names_of(SymbolKind.INPUT)}
        self._tensors = own, sample

        def executor(graph: Graph, tensors: Mapping[str, Tensor]) -> Executor:
            return Executor(
                graph, program, lambda name: tensors[name] if name in tensors else tensor_of(name), transport=transport
            )

        self.graphs = _evaluation_graphs(program)
        self.executors = [*map(executor, self.graphs, self._tensors)]

    def take(self, tensors: Mapping[str, Tensor], number: int = 0) -> None:
        """Copy a batch for executor `number`, or running statistics."""
        for name, tensor in tensors.items():
            self._tensors[number][name].copy_(tensor)


def infer(
    path: Path,
    options: RunOptions,
    communicator: Communicator,
    activity: Activity = UNWATCHED,
    live: Given = NOTHING,
    *,
    keeps_outputs: bool = False,
) -> tuple[InferenceRecord, list[Tensor]]:
    """Collective. `run --inference`: for the held-out samples, or all if none are held out. Without inputs that only
    the loss reads, there are no loss and no metrics. With `keeps_outputs`, rank 0 has the outputs of all samples, in
    the order of the data."""
    document, began_s = read(path), time.perf_counter()
    resolved = resolve_run(options, document.training_defaults, document.data_source)
    check_trusted(path, document, options, communicator)
    program, seed, keeps_outputs = document.program, resolved.training.seed, keeps_outputs or bool(options.predictions)
    threads, graphs = options.threads or process.default_threads(communicator, 1), Graphs(path, document, resolved)
    with process.repeatable(threads), blamed_on_strangers(document):
        activity.does("opening the data")
        seed_everything(derive(seed, 0, 0, 0, Stream.SOURCE))
        specs, outputs_only = input_specs(program), without_loss(program)
        names = [spec.name for spec in specs]
        labels = {*names}.difference(spec.name for spec in input_specs(outputs_only))
        of_pef = live.data is None and "source" not in as_table(options.overrides.get("data"))
        with process.repeatable(threads):  # its module may set another number
            source = open_source(
                resolved.padded_data, tuple(specs), live, labels, resolved.evaluation if of_pef else None
            )
        activity.waits("waiting for peers to open the data")
        check_sources(communicator, [source])
        notices = list(changed(document)) if communicator.rank == 0 else []
        dataset = source.evaluation or source.train
        if labels:
            if isinstance(first := batches.batch_of(dataset, [0]), DataError):
                raise first
            values = dict(batches.values_of(first))
            lacks = not labels <= values.keys() if isinstance(first, Mapping) else len(values) < len(names)
            if lacks:
                program, graphs = outputs_only, replace(graphs, change=without_loss)
                notices.append(f"no loss, because the samples have no {', '.join(sorted(labels))}")
        given, told = given_weights(options, program, communicator, live.weights)
        held, notices = {**map_weights(path, document), **given}, [*notices, *told]
        evaluator = _evaluator(graphs, communicator, activity, held, live.metrics)
        inferred = evaluator.infer(dataset, communicator.rank, communicator.world_size, seed)
        own = [
            (sums, outcome, [*map(torch.clone, outputs if keeps_outputs else ())])
            for sums, outputs, outcome in inferred
        ]
        activity.waits("waiting for peers to predict")
        of_batches = [*in_turn(communicator.gather_object(own) or ())]
        measured = communicator.from_first(lambda: evaluator.over((sums, outcome) for sums, outcome, _ in of_batches))
        activity.takes_long("saving the predictions")
        parts_of = [*zip(*(outputs for *_, outputs in of_batches), strict=True)]
        if any(len({part.shape[1:] for part in parts}) > 1 for parts in parts_of):
            what = "outputs of samples of several lengths have several shapes, and predictions are one tensor"
            raise OptionError(what, remedy="let the model return one number of values for each sample")
        all_outputs = [*map(torch.cat, parts_of)]
        if options.predictions is not None and communicator.rank == 0:
            named = {f"output_{index}": output for index, output in enumerate(all_outputs)}
            write_tensors(options.predictions, named, "the predictions", "--predictions FILE.safetensors")
        record = InferenceRecord(
            pef_digest=document.digest,
            data=source.name,
            held_out=source.evaluation is not None,
            weights=None if options.weights is None else str(options.weights),
            **measured,
            prediction_s=time.perf_counter() - began_s,
            predictions=None if options.predictions is None else str(options.predictions),
            notices=notices,
        )
        return record, all_outputs


def _evaluator(
    graphs: Graphs,
    world: Communicator,
    activity: Activity,
    weights: Mapping[str, Tensor],
    functions: Mapping[str, Function],
) -> Evaluator:
    program = graphs.program
    mesh = copy_mesh(program.mesh)  # this process plays all ranks that hold the model
    process.check_node_memory(world, program.device_bytes * mesh.world_size)

    def fill(memory: DeviceMemory, rank: int) -> None:
        place_weights(memory, weights, mesh.coordinates(rank))
        for tensor, argument in arguments_in(memory, graphs.run.arguments):
            tensor.fill_(argument.at(None, 0, 1.0))

    ranks = open_ranks(program, single_rank(world.host_name), Way.IN_PROCESS, fill, range(mesh.world_size), mesh)
    evaluator = Evaluator(graphs, ranks, activity, (), functions)
    buffers = program.names_of(SymbolKind.BUFFER)
    evaluator.use([{name: of.memory.tensor(name) for name in buffers if name in of.program.symbols} for of in ranks])
    return evaluator


def in_turn(of_ranks: Iterable[Sequence[Part]]) -> Iterator[Part]:
    """What ranks have of the batches of a data set, in its order: see `Evaluator.infer`."""
    return (part for parts in zip_longest(*of_ranks) for part in parts if part is not None)
