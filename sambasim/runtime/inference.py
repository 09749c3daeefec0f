"""The evaluation graph on held-out samples, during a run, and `run --inference`: its outputs for a data set.

During a run, rank r of N takes the samples r, r + N, …, with the running statistics of replica 0; padding of its last
batch is discarded. `run --inference` deals out whole batches instead.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader

from sambasim.data import batches
from sambasim.data.datasets import WatchedDataset, open_source
from sambasim.data.workers import batches_of, worker_options
from sambasim.ir.graph import Graph
from sambasim.ir.mesh import copy_mesh
from sambasim.ir.program import Program
from sambasim.ir.ranks import without_loss
from sambasim.ir.types import SymbolKind
from sambasim.options.run import ResolvedRun, RunOptions, resolve_run
from sambasim.pef import map_weights, read
from sambasim.pef.digests import changed
from sambasim.records.metrics import EvaluationRecord, InferenceRecord
from sambasim.runtime.engine.executor import Batch, Executor, outputs_in_order
from sambasim.runtime.machine import process
from sambasim.runtime.machine.communicator import Communicator, single_rank
from sambasim.runtime.machine.process import Stream, derive, seed_everything
from sambasim.runtime.run.replica import input_specs
from sambasim.runtime.run.setup import blamed_on_strangers, check_sources, check_trusted
from sambasim.runtime.transports.connect import Transport, Way, open_ranks
from sambasim.runtime.transports.in_process import run_together
from sambasim.runtime.values.memory import DeviceMemory, fitting, load_weights, place_weights, write_tensors
from sambasim.runtime.watch.status_file import UNWATCHED, Activity

TARGET = "target"

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of one rank over its samples. `correct` of `classified` elements have the right class."""

    samples: int = 0
    loss: float = 0.0
    correct: int = 0
    classified: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def record(self, step: int, epoch: int, has_loss: bool, began_s: float) -> EvaluationRecord:
        return EvaluationRecord(
            step=step,
            epoch=epoch + 1,
            samples=self.samples,
            loss=self.loss / self.samples if has_loss and self.samples else None,
            accuracy=self.correct / self.classified if self.classified else None,
            evaluation_s=time.perf_counter() - began_s,
        )


@dataclass(frozen=True, slots=True)
class _Deal:
    """The batches of a rank, as the sampler of a loader: up to `size` of the `indices` from each of `starts` on."""

    indices: range
    starts: range
    size: int

    def __iter__(self) -> Iterator[list[int]]:
        return (list(self.indices[start : start + self.size]) for start in self.starts)


class Evaluator:
    """Runs the evaluation graph of one replica, with targets and for inference, on its `ranks` in this process."""

    def __init__(
        self, program: Program, ranks: Sequence[Transport], resolved: ResolvedRun, activity: Activity = UNWATCHED
    ) -> None:
        self._program, self._loss, self._options, self._activity = program, resolved.loss, resolved.data, activity
        self._inputs = input_specs(program)
        self._has_loss = program.loss is not None
        self._hub = ranks[0].hub
        self._generators: dict[int, Tensor] = {}
        self._loaders: dict[tuple[int, _Deal], DataLoader[object]] = {}  # to keep worker processes
        self._ranks = [_Rank(rank) for rank in ranks]

    def use_buffers(self, buffers: Sequence[Mapping[str, Tensor]]) -> None:
        """Use these running statistics, of replica 0's ranks."""
        for rank, own in zip(self._ranks, buffers, strict=True):
            rank.take(own)

    def sums(self, dataset: WatchedDataset, rank: int, world_size: int, seed: int, step: int) -> Sums:
        seed_everything(derive(seed, rank, step, 0, Stream.DATA))
        self._generators.clear()
        total = Sums()
        own, size = range(rank, len(dataset), world_size), self._program.batch_size
        for batch, count in self._batches(dataset, _Deal(own, range(0, len(own), size), size)):
            total += self._sums_of(self._run(batch, self._program.evaluation), batch, count)
        return total

    def infer(self, dataset: WatchedDataset, rank: int, world_size: int) -> Iterator[tuple[Sums, list[Tensor]]]:
        """For each batch of this rank, its sums, and the outputs of which it is the first axis, without padding. Rank r
        of N has the batches r, r + N, …, so that each has the samples, and so the bits, that it has on one rank."""
        size, samples = self._program.batch_size, len(dataset)
        own = _Deal(range(samples), range(rank * size, samples, world_size * size), size)
        for batch, count in self._batches(dataset, own):
            outputs = self._run(batch, self._program.evaluation)
            kept = outputs[1:] if self._has_loss else outputs
            yield self._sums_of(outputs, batch, count), [o[:count].clone() for o in kept if o.shape[:1] == (size,)]

    def _batches(self, dataset: WatchedDataset, deal: _Deal) -> Iterator[tuple[Batch, int]]:
        options, key = self._options, (id(dataset), deal)
        if key not in self._loaders:
            self._loaders[key] = DataLoader(
                dataset,
                batch_sampler=deal,
                collate_fn=batches.collate,
                **worker_options(options.workers),
                prefetch_factor=options.prefetch_factor,
                persistent_workers=options.persistent_workers,
                # Kept workers draw no seed again: so that evaluations draw alike, none draws from the global generator.
                generator=Generator() if options.persistent_workers else None,
            )
        read = batches_of(self._loaders[key], options.source or "the data")
        for number, indices in enumerate(deal, start=1):
            self._activity.does(f"evaluating batch {number} of {len(deal.starts)}")
            batch, count = next(read), len(indices)
            tensors = batches.bind(batch, [spec.name for spec in self._inputs], ignore_rest=not self._has_loss)
            for name, tensor in tensors.items():
                missing = deal.size - tensor.shape[0]
                if missing > 0:
                    tensors[name] = torch.cat([tensor, tensor[:1].expand(missing, *tensor.shape[1:])])
            yield batches.check(tensors, self._inputs, deal.size), count

    def _run(self, batch: Batch, graph: Graph, number: int = 0) -> list[Tensor]:
        """Run the executors `number` of the ranks, of `graph`. Returns the outputs of the first rank that has any."""
        for rank in self._ranks:
            rank.take(batch, number)
        passes = [rank.executors[number].run() for rank in self._ranks]
        of_ranks = run_together(passes, self._hub, self._generators)
        return outputs_in_order(graph, next(filter(None, (outputs for (outputs,) in of_ranks)), {}))

    def _sums_of(self, outputs: Sequence[Tensor], batch: Mapping[str, Tensor], count: int) -> Sums:
        """The sums over the first `count` samples of a batch, from the outputs of the graph."""
        if not self._has_loss:
            return Sums(samples=count)
        if self._program.per_sample_loss:
            if not outputs:
                return Sums()  # another rank of the replica has them
            correct, classified = self._count_correct(outputs[1:], batch, count)
            return Sums(count, float(outputs[0][:count].double().sum()), correct, classified)
        if count == self._program.batch_size:
            return Sums(count, float(outputs[0]) * count) if outputs else Sums()
        # The model returns one mean over a batch with padding: run the real samples one by one, or skip them.
        total, single = Sums(), self._program.single
        for index in range(count):
            sample = {name: tensor[index : index + 1] for name, tensor in batch.items()}
            if single is not None and (loss := self._run(sample, single, 1)):
                total += Sums(1, float(loss[0]))
        return total

    def _count_correct(self, outputs: Sequence[Tensor], batch: Mapping[str, Tensor], count: int) -> tuple[int, int]:
        """The number of correctly classified elements, and of all; (0, 0) if the loss is no classification."""
        if self._loss is None or TARGET not in batch:
            return 0, 0
        guess, target = outputs[0][:count], batch[TARGET][:count]
        if self._loss.name in ("cross_entropy", "nll") and not target.is_floating_point():
            ignored = self._loss.args.get("ignore_index", -100)
            counted = target.ne(ignored if isinstance(ignored, int) else -100)
            return int((guess.argmax(1).eq(target) & counted).sum()), int(counted.sum())
        if self._loss.name == "bce_with_logits":
            return int(guess.gt(0).eq(target.gt(0.5)).sum()), target.numel()
        return 0, 0


class _Rank:
    """One rank of a replica, with inputs and running statistics of its own. `executors`: of the evaluation graph, and
    of that at batch 1, if the program has it."""

    def __init__(self, transport: Transport) -> None:
        program, memory = transport.program, transport.memory
        names = program.names_of(SymbolKind.BUFFER, SymbolKind.INPUT)
        own = {name: torch.empty_like(memory.tensor(name)) for name in names}
        sample = own | {name: own[name][:1].clone() for name in program.names_of(SymbolKind.INPUT)}
        self._tensors = own, sample

        def executor(graph: Graph, tensors: Mapping[str, Tensor]) -> Executor:
            return Executor(graph, program, lambda name: tensors.get(name, memory.tensor(name)), transport=transport)

        self.executors = [executor(program.evaluation, own)]
        if program.single is not None:
            self.executors.append(executor(program.single, sample))

    def take(self, tensors: Mapping[str, Tensor], number: int = 0) -> None:
        """Copy a batch for executor `number`, or running statistics."""
        for name, tensor in tensors.items():
            self._tensors[number][name].copy_(tensor)


def buffers_of(memory: DeviceMemory) -> Mapping[str, Tensor]:
    return {name: memory.tensor(name) for name in memory.program.names_of(SymbolKind.BUFFER)}


class InferenceJob:
    """`run --inference`: the outputs for the held-out samples, or all if none are held out, distributed over the ranks.
    Without inputs that only the loss reads, there is no loss. `data` and `weights` replace those of the PEF. With
    `keeps_outputs`, rank 0 has the `outputs` of all samples, in the order of the data."""

    def __init__(
        self,
        path: Path,
        options: RunOptions,
        communicator: Communicator,
        activity: Activity = UNWATCHED,
        data: object = None,
        weights: Mapping[str, Tensor] | None = None,
        *,
        keeps_outputs: bool = False,
    ) -> None:
        self._path, self._options, self._communicator = path, options, communicator
        self._activity, self._data, self._weights = activity, data, weights
        self._keeps_outputs = keeps_outputs or options.predictions is not None
        self.outputs: list[Tensor] = []
        self._document = read(path)
        self._program = self._document.program
        self._resolved = resolve_run(options, self._document.training_defaults, self._document.data_source)
        check_trusted(path, self._document, options, communicator)

    def run(self) -> InferenceRecord:
        threads = self._options.threads or process.default_threads(self._communicator, 1)
        with process.repeatable(threads), blamed_on_strangers(self._document):
            return self._infer()

    def _infer(self) -> InferenceRecord:
        began_s = time.perf_counter()
        communicator, options, activity = self._communicator, self._options, self._activity
        seed = self._resolved.training.seed
        activity.does("opening the data")
        seed_everything(derive(seed, 0, 0, 0, Stream.SOURCE))
        specs, outputs_only = input_specs(self._program), without_loss(self._program)
        names = [spec.name for spec in specs]
        labels = {*names}.difference(spec.name for spec in input_specs(outputs_only))
        source = open_source(self._resolved.data, tuple(specs), self._data, labels)
        activity.waits("waiting for peers to open the data")
        check_sources(communicator, [source])
        notices = list(changed(self._document)) if communicator.rank == 0 else []
        dataset = source.evaluation or source.train
        if labels:
            values = dict(batches.values_of(sample := dataset[0]))
            lacks = not labels <= values.keys() if isinstance(sample, Mapping) else len(values) < len(names)
            if lacks:
                self._program = outputs_only
                notices.append(f"no loss, because the samples have no {', '.join(sorted(labels))}")
        seed_everything(derive(seed, communicator.rank, 0, 0, Stream.DATA))
        of_batches, kept = list[Sums](), []
        for sums, outputs in self._evaluator().infer(dataset, communicator.rank, communicator.world_size):
            of_batches.append(sums)
            kept += [outputs] if self._keeps_outputs else []
        activity.waits("waiting for peers to predict")
        total = sum(_in_turn(communicator.all_gather_object(of_batches)), Sums())
        evaluation = total.record(0, 0, self._program.loss is not None, began_s)
        if self._keeps_outputs:
            activity.takes_long("saving the predictions")
            self.outputs = self._gathered(kept)
        if options.predictions is not None and communicator.rank == 0:
            named = {f"output_{index}": output for index, output in enumerate(self.outputs)}
            write_tensors(options.predictions, named, "the predictions", "--predictions FILE.safetensors")
        return InferenceRecord(
            pef_digest=self._document.digest,
            data=source.name,
            held_out=source.evaluation is not None,
            weights=None if options.weights is None else str(options.weights),
            samples=evaluation.samples,
            loss=evaluation.loss,
            accuracy=evaluation.accuracy,
            prediction_s=time.perf_counter() - began_s,
            predictions=None if options.predictions is None else str(options.predictions),
            notices=notices,
        )

    def _evaluator(self) -> Evaluator:
        program = self._program
        mesh = copy_mesh(program.mesh)  # this process plays all ranks that hold the model
        process.check_node_memory(self._communicator, program.device_bytes * mesh.world_size)
        weights = dict(map_weights(self._path, self._document))
        if self._options.weights is not None:
            weights |= load_weights(self._options.weights, program)
        if self._weights is not None:
            weights |= fitting(self._weights, program, "the given weights")

        def fill(memory: DeviceMemory, rank: int) -> None:
            place_weights(memory, weights, mesh.coordinates(rank))

        alone = single_rank(self._communicator.host_name)
        ranks = open_ranks(program, alone, Way.IN_PROCESS, fill, range(mesh.world_size), mesh)
        evaluator = Evaluator(program, ranks, self._resolved, self._activity)
        evaluator.use_buffers([buffers_of(rank.memory) for rank in ranks])
        return evaluator

    def _gathered(self, of_batches: list[list[Tensor]]) -> list[Tensor]:
        """Collective. The outputs of all samples in dataset order, on rank 0."""
        own = [torch.cat(parts) for parts in zip(*of_batches, strict=True)]
        everybody = self._communicator.gather_object(own) or ()
        of_outputs = zip(*filter(None, everybody), strict=True)  # a rank may have no samples
        size = self._program.batch_size
        return [torch.cat(list(_in_turn([part.split(size) for part in parts]))) for parts in of_outputs]


def _in_turn(of_ranks: Sequence[Sequence[Part]]) -> Iterator[Part]:
    """What ranks have of the batches of a data set, in its order: see `Evaluator.infer`."""
    return (part for parts in zip_longest(*of_ranks) for part in parts if part is not None)
