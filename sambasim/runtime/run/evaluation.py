"""The evaluation graph on held-out samples, during a run and for `run --inference`.

Rank r of N takes the samples r, r + N, …, with the running statistics of replica 0; padding of its last batch is
discarded.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Subset

from sambasim.data.batches import batches_of, bind, check, collate
from sambasim.data.datasets import WatchedDataset
from sambasim.errors import InternalError
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.options.grammar import InputSpec
from sambasim.options.training import DataOptions, LossOptions
from sambasim.records.metrics import EvaluationRecord
from sambasim.runtime.engine.executor import Executor, Steps, outputs_in_order
from sambasim.runtime.machine.determinism import Stream, derive, seed_everything
from sambasim.runtime.run.replica import input_specs
from sambasim.runtime.transports.in_process import run_together
from sambasim.runtime.transports.transport import Transport
from sambasim.runtime.values.device import DeviceMemory
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
