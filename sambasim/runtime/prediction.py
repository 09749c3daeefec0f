"""`run --inference`: a pass over the data with the evaluation graph, and what the model says of every sample."""

import time
from pathlib import Path

import torch
from torch import Tensor

from sambasim.data.sources import open_source
from sambasim.ir.types import SymbolKind
from sambasim.options.run import RunOptions, resolve_run
from sambasim.pef import map_weights, read
from sambasim.records.metrics import PredictionRecord
from sambasim.runtime.admission import check_trusted
from sambasim.runtime.capacity import check_node_memory, default_threads
from sambasim.runtime.determinism import Stream, derive, repeatable, seed_everything
from sambasim.runtime.device import DeviceMemory, private_storage
from sambasim.runtime.evaluation import Evaluator, Sums, record
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.replica import input_specs, place_weights
from sambasim.runtime.setup import check_sources
from sambasim.runtime.supervision.status_file import UNWATCHED, Activity
from sambasim.runtime.weights import load_weights, write_tensors


class PredictionJob:
    """Predicts for the held-out samples, or for all where none are held out; the ranks share them out."""

    def __init__(
        self, path: Path, options: RunOptions, communicator: Communicator, activity: Activity = UNWATCHED
    ) -> None:
        self._activity = activity
        self._path = path
        self._options = options
        self._communicator = communicator
        self._document = read(path)
        self._program = self._document.program
        self._resolved = resolve_run(options, self._document.training_defaults, self._document.data_source)
        check_trusted(path, self._document, options, communicator)

    def run(self) -> PredictionRecord:
        """Collective. Predict, save, and return what was found."""
        with repeatable(self._options.threads or default_threads(self._communicator, 1)):
            return self._predict()

    def _predict(self) -> PredictionRecord:
        began_s = time.perf_counter()
        topology = self._communicator.topology
        seed = self._resolved.training.seed
        self._activity.does("opening the data")
        seed_everything(derive(seed, 0, 0, 0, Stream.SOURCE))
        source = open_source(self._resolved.data, tuple(input_specs(self._program)))
        self._activity.waits("waiting for peers to open the data")
        check_sources(self._communicator, [source])
        seed_everything(derive(seed, topology.rank, 0, 0, Stream.DATA))
        dataset = source.evaluation or source.train
        total, kept = Sums(), []
        for sums, outputs in self._evaluator().predict(dataset, topology.rank, topology.world_size):
            total += sums
            if self._options.predictions is not None:
                kept.append(outputs)
        self._activity.waits("waiting for peers to predict")
        of_all = sum(self._communicator.all_gather_object(total), Sums())
        found = record(of_all, 0, 0, self._program.loss is not None, began_s)
        if self._options.predictions is not None:
            self._activity.takes_long("saving the predictions")
            self._save(self._options.predictions, kept)
        return PredictionRecord(
            pef_digest=self._document.digest,
            data=source.name,
            held_out=source.evaluation is not None,
            weights=None if self._options.weights is None else str(self._options.weights),
            samples=found.samples,
            loss=found.loss,
            accuracy=found.accuracy,
            prediction_s=time.perf_counter() - began_s,
            predictions=None if self._options.predictions is None else str(self._options.predictions),
        )

    def _evaluator(self) -> Evaluator:
        program = self._program
        check_node_memory(self._communicator, program.device_bytes)
        memory = DeviceMemory(program, private_storage(program.device_bytes))
        weights = dict(map_weights(self._path))
        if self._options.weights is not None:
            weights |= load_weights(self._options.weights, program)
        place_weights(program, memory, weights)
        evaluator = Evaluator(program, memory, self._resolved.loss, self._resolved.data, self._activity)
        buffers = [symbol.name for symbol in program.symbols.values() if symbol.kind is SymbolKind.BUFFER]
        evaluator.use_buffers({name: memory.tensor(name) for name in buffers})
        return evaluator

    def _save(self, path: Path, batches: list[list[Tensor]]) -> None:
        """Collective. The outputs of all samples, in the order of the data set, as `output_0`, `output_1`, …"""
        own = [torch.cat(parts) for parts in zip(*batches, strict=True)]
        everybody = self._communicator.gather_object(own)
        if everybody is None:
            return
        with_samples = [parts for parts in everybody if parts]  # a rank may have had none: fewer samples than ranks
        columns = zip(*with_samples, strict=True)
        tensors = {f"output_{index}": _interleave(parts) for index, parts in enumerate(columns)}
        write_tensors(path, tensors, "the predictions", "--predictions FILE.safetensors")


def _interleave(parts: tuple[Tensor, ...]) -> Tensor:
    """The samples in their own order: rank r of N had the samples r, r + N, …"""
    whole = parts[0].new_empty((sum(part.shape[0] for part in parts), *parts[0].shape[1:]))
    for rank, part in enumerate(parts):
        whole[rank :: len(parts)] = part
    return whole
