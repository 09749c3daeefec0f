"""`run --inference`: the outputs of the evaluation graph for a data set."""

import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sambasim.data.batches import values_of
from sambasim.data.sources import open_source
from sambasim.ir.mesh import Mesh, copy_mesh
from sambasim.ir.views import without_loss
from sambasim.options.resolve import resolve_run
from sambasim.options.run import RunOptions
from sambasim.pef import map_weights, read
from sambasim.pef.sources import changed
from sambasim.records.metrics import InferenceRecord
from sambasim.runtime.machine.communicator import Communicator, single_rank
from sambasim.runtime.machine.determinism import Stream, derive, repeatable, seed_everything
from sambasim.runtime.machine.resources import check_node_memory, default_threads
from sambasim.runtime.run.evaluation import Evaluator, Sums, buffers_of, record
from sambasim.runtime.run.replica import input_specs, place_weights
from sambasim.runtime.run.setup import check_sources, check_trusted
from sambasim.runtime.transports.connect import Way, open_ranks
from sambasim.runtime.values.device import DeviceMemory
from sambasim.runtime.values.weights import fitting, load_weights, write_tensors
from sambasim.runtime.watch.status_file import UNWATCHED, Activity


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
