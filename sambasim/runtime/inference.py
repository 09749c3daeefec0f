"""`run --inference`: the outputs of the evaluation graph for a data set."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Subset

from sambasim.data.batches import batches_of, bind, check, collate, values_of
from sambasim.data.datasets import WatchedDataset
from sambasim.data.sources import open_source
from sambasim.errors import InternalError
from sambasim.ir.mesh import Mesh, copy_mesh
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.ir.views import without_loss
from sambasim.options.grammar import InputSpec
from sambasim.options.resolve import resolve_run
from sambasim.options.run import RunOptions
from sambasim.options.training import DataOptions, LossOptions
from sambasim.pef import map_weights, read
from sambasim.pef.sources import changed
from sambasim.records.metrics import EvaluationRecord, InferenceRecord
from sambasim.runtime.engine.executor import Executor, Steps, outputs_in_order
from sambasim.runtime.machine.communicator import Communicator, single_rank
from sambasim.runtime.machine.pytorch import Stream, derive, repeatable, seed_everything
from sambasim.runtime.machine.resources import check_node_memory, default_threads
from sambasim.runtime.run.replica import input_specs
from sambasim.runtime.run.setup import check_sources, check_trusted
from sambasim.runtime.transports.connect import Transport, Way, open_ranks
from sambasim.runtime.transports.in_process import run_together
from sambasim.runtime.values.memory import DeviceMemory, fitting, load_weights, place_weights, write_tensors
from sambasim.runtime.watch.status_file import UNWATCHED, Activity

TARGET = "target"


@dataclass(frozen=True, slots=True)
class Sums:
    """The sums of one rank over its samples. `correct` of `classified` elements have the right class."""

    samples: int = 0
    loss: float = 0.0
    correct: int = 0
    classified: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*map(sum, zip(astuple(self), astuple(other), strict=True)))


class Evaluator:
    """Runs the evaluation graph of one replica, for samples with a target and for inference. `ranks`: those of the
    replica in this process."""

    def __init__(
        self,
        program: Program,
        ranks: Sequence[Transport],
        loss: LossOptions | None,
        options: DataOptions,
        activity: Activity = UNWATCHED,
    ) -> None:
        self._activity = activity
        self._program = program
        self._loss = loss
        self._options = options
        self._inputs = input_specs(program)
        self._has_loss = program.loss is not None
        self._hub = ranks[0].hub
        self._generators: dict[int, Tensor] = {}
        self._loaders: dict[tuple[int, int], DataLoader[object]] = {}  # by dataset and rank, to keep worker processes
        self._ranks = [_Rank(rank, self._inputs) for rank in ranks]

    def use_buffers(self, buffers: Sequence[Mapping[str, Tensor]]) -> None:
        """Use these running statistics, of replica 0's ranks."""
        for rank, own in zip(self._ranks, buffers, strict=True):
            rank.take(own)

    def sums(self, dataset: WatchedDataset, rank: int, world_size: int, seed: int, step: int) -> Sums:
        seed_everything(derive(seed, rank, step, 0, Stream.DATA))
        self._generators.clear()
        total = Sums()
        for batch, count in self._batches(dataset, rank, world_size):
            total += self._sums_of(self._run(batch), batch, count)
        return total

    def infer(self, dataset: WatchedDataset, rank: int, world_size: int) -> Iterator[tuple[Sums, list[Tensor]]]:
        """For each batch of `rank`: its sums, and the model's outputs without padding. Outputs whose first axis is not
        the batch are left out."""
        size = self._program.batch_size
        for batch, count in self._batches(dataset, rank, world_size):
            outputs = self._run(batch)
            kept = outputs[1:] if self._has_loss else outputs
            yield self._sums_of(outputs, batch, count), [o[:count].clone() for o in kept if o.shape[:1] == (size,)]

    def _batches(
        self, dataset: WatchedDataset, rank: int, world_size: int
    ) -> Iterator[tuple[Mapping[str, Tensor], int]]:
        indices, options = range(rank, len(dataset), world_size), self._options
        size, key = self._program.batch_size, (id(dataset), rank)
        if key not in self._loaders:
            self._loaders[key] = DataLoader(
                Subset(dataset, indices),
                batch_size=size,
                collate_fn=collate,
                num_workers=options.workers,
                prefetch_factor=options.prefetch_factor,
                persistent_workers=options.persistent_workers,
                # Kept workers draw no seed again: so that evaluations draw alike, none draws from the global generator.
                generator=Generator() if options.persistent_workers else None,
            )
        batches = batches_of(self._loaders[key], options.source or "the data")
        for start in range(0, len(indices), size):
            self._activity.does(f"evaluating batch {start // size + 1} of {-(-len(indices) // size)}")
            batch = next(batches)
            count = min(size, len(indices) - start)
            tensors = bind(batch, [spec.name for spec in self._inputs], ignore_rest=not self._has_loss)
            yield check({name: _pad(tensor, size) for name, tensor in tensors.items()}, self._inputs, size), count

    def _run(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        for rank in self._ranks:
            rank.take(batch)
        outputs = run_together([rank.batch.run() for rank in self._ranks], self._hub, self._generators)
        return outputs_in_order(self._program.evaluation, _made(outputs))

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
        return sum((self._sums_of_single(batch, index) for index in range(count)), Sums())

    def _sums_of_single(self, batch: Mapping[str, Tensor], index: int) -> Sums:
        if self._program.single is None:
            return Sums()
        passes = [
            rank.single_pass({name: tensor[index : index + 1] for name, tensor in batch.items()})
            for rank in self._ranks
        ]
        made = _made(run_together(passes, self._hub, self._generators))
        outputs = outputs_in_order(self._program.single, made)
        return Sums(1, float(outputs[0])) if outputs else Sums()

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


def _made(outputs: Sequence[Sequence[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Those of the first rank that has any."""
    return next(filter(None, (of_rank[0] for of_rank in outputs)), {})


class _Rank:
    """One rank of a replica: its evaluation graphs, with inputs and running statistics of their own."""

    def __init__(self, transport: Transport, inputs: Sequence[InputSpec]) -> None:
        program, memory = transport.program, transport.memory
        self._own = {
            name: torch.empty_like(memory.tensor(name))
            for name, symbol in program.symbols.items()
            if symbol.kind in (SymbolKind.BUFFER, SymbolKind.INPUT)
        }
        self.batch = Executor(
            program.evaluation, program, lambda name: self._own.get(name, memory.tensor(name)), transport=transport
        )
        self._single_inputs = {spec.name: self._own[spec.name][:1].clone() for spec in inputs}
        own = {**self._own, **self._single_inputs}
        self._single = (
            Executor(program.single, program, lambda name: own.get(name, memory.tensor(name)), transport=transport)
            if program.single is not None
            else None
        )

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a batch, or running statistics."""
        for name, tensor in tensors.items():
            self._own[name].copy_(tensor)

    def single_pass(self, sample: Mapping[str, Tensor]) -> Steps[list[dict[str, Tensor]]]:
        if self._single is None:
            raise InternalError("an evaluation graph at batch 1 that the program lacks")
        for name, tensor in sample.items():
            self._single_inputs[name].copy_(tensor)
        return self._single.run()


def _pad(tensor: Tensor, size: int) -> Tensor:
    missing = size - tensor.shape[0]
    return torch.cat([tensor, tensor[:1].expand(missing, *tensor.shape[1:])]) if missing > 0 else tensor


def buffers_of(program: Program, memory: DeviceMemory) -> Mapping[str, Tensor]:
    names = [symbol.name for symbol in program.symbols.values() if symbol.kind is SymbolKind.BUFFER]
    return {name: memory.tensor(name) for name in names}


def record(sums: Sums, step: int, epoch: int, has_loss: bool, began_s: float) -> EvaluationRecord:
    return EvaluationRecord(
        step=step,
        epoch=epoch + 1,
        samples=sums.samples,
        loss=sums.loss / sums.samples if has_loss and sums.samples else None,
        accuracy=sums.correct / sums.classified if sums.classified else None,
        evaluation_s=time.perf_counter() - began_s,
    )


class InferenceJob:
    """`run --inference`: the outputs for the held-out samples, or all if none are held out, distributed over the ranks.
    Samples may lack the inputs that only the loss reads: then there is no loss. `data` replaces the data source, and
    `weights`, by the names of a state_dict, those of the PEF. With `keeps_outputs`, rank 0 has the `outputs` of all
    samples after the run, in the order of the data."""

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
        self._activity = activity
        self._data = data
        self._weights = weights
        self._keeps_outputs = keeps_outputs or options.predictions is not None
        self.outputs: list[Tensor] = []
        self._path = path
        self._options = options
        self._communicator = communicator
        self._document = read(path)
        self._program = self._document.program
        self._resolved = resolve_run(options, self._document.training_defaults, self._document.data_source)
        check_trusted(path, self._document, options, communicator)

    def run(self) -> InferenceRecord:
        with repeatable(self._options.threads or default_threads(self._communicator, 1)):
            return self._infer()

    def _infer(self) -> InferenceRecord:
        began_s = time.perf_counter()
        seed = self._resolved.training.seed
        self._activity.does("opening the data")
        seed_everything(derive(seed, 0, 0, 0, Stream.SOURCE))
        names, outputs_only = input_specs(self._program), without_loss(self._program)
        labels = {spec.name for spec in names} - {spec.name for spec in input_specs(outputs_only)}
        source = open_source(self._resolved.data, tuple(names), self._data, labels)
        self._activity.waits("waiting for peers to open the data")
        check_sources(self._communicator, [source], Mesh({}))
        notices = changed(self._document) if self._communicator.rank == 0 else ()
        if labels and _lacks((source.evaluation or source.train)[0], [spec.name for spec in names], labels):
            self._program = outputs_only
            notices = (*notices, f"no loss, because the samples have no {', '.join(sorted(labels))}")
        seed_everything(derive(seed, self._communicator.rank, 0, 0, Stream.DATA))
        dataset = source.evaluation or source.train
        total, kept = Sums(), []
        for sums, outputs in self._evaluator().infer(dataset, self._communicator.rank, self._communicator.world_size):
            total += sums
            if self._keeps_outputs:
                kept.append(outputs)
        self._activity.waits("waiting for peers to predict")
        of_all = sum(self._communicator.all_gather_object(total), Sums())
        evaluation = record(of_all, 0, 0, self._program.loss is not None, began_s)
        if self._keeps_outputs:
            self._activity.takes_long("saving the predictions")
            self.outputs = self._gathered(kept)
        if self._options.predictions is not None and self._communicator.rank == 0:
            named = {f"output_{index}": output for index, output in enumerate(self.outputs)}
            write_tensors(self._options.predictions, named, "the predictions", "--predictions FILE.safetensors")
        return InferenceRecord(
            pef_digest=self._document.digest,
            data=source.name,
            held_out=source.evaluation is not None,
            weights=None if self._options.weights is None else str(self._options.weights),
            samples=evaluation.samples,
            loss=evaluation.loss,
            accuracy=evaluation.accuracy,
            prediction_s=time.perf_counter() - began_s,
            predictions=None if self._options.predictions is None else str(self._options.predictions),
            notices=list(notices),
        )

    def _evaluator(self) -> Evaluator:
        program = self._program
        mesh = copy_mesh(program.mesh)  # this process plays all ranks that hold the model
        check_node_memory(self._communicator, program.device_bytes * mesh.world_size)
        weights = dict(map_weights(self._path, self._document))
        if self._options.weights is not None:
            weights |= load_weights(self._options.weights, program)
        if self._weights is not None:
            weights |= fitting(self._weights, program, "the given weights")

        def fill(memory: DeviceMemory, rank: int) -> None:
            place_weights(memory.program, memory, weights, mesh.coordinates(rank))

        alone = single_rank(self._communicator.host_name)
        ranks = open_ranks(program, alone, Way.IN_PROCESS, fill, range(mesh.world_size), mesh)
        evaluator = Evaluator(program, ranks, self._resolved.loss, self._resolved.data, self._activity)
        evaluator.use_buffers([buffers_of(rank.program, rank.memory) for rank in ranks])
        return evaluator

    def _gathered(self, batches: list[list[Tensor]]) -> list[Tensor]:
        """Collective. The outputs of all samples in dataset order, on rank 0."""
        own = [torch.cat(parts) for parts in zip(*batches, strict=True)]
        everybody = self._communicator.gather_object(own) or ()
        columns = zip(*[parts for parts in everybody if parts], strict=True)  # a rank may have no samples
        return [_interleave(parts) for parts in columns]


def _lacks(sample: object, names: Sequence[str], labels: Collection[str]) -> bool:
    """Whether a sample has no `labels`, which are among the inputs `names`."""
    values = dict(values_of(sample))
    if isinstance(sample, Mapping):
        return any(name not in values for name in labels)
    return len(values) < len(names)


def _interleave(parts: tuple[Tensor, ...]) -> Tensor:
    whole = parts[0].new_empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole
