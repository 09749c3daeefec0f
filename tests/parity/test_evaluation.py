"""Evaluation over any number of replicas: each sample once, in the running statistics that are given, leaving no trace.

Held against `model.eval()` on all samples at once. There are 11 of them and a batch takes 4: the last one is padded.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

from sambasim.data.datasets import WatchedDataset, open_source
from sambasim.ir.types import SymbolKind
from sambasim.options.run import RunOptions
from sambasim.pef import map_weights, read
from sambasim.runtime.inference import Evaluator, Sums, in_turn
from sambasim.runtime.machine.node_memory import private_storage
from sambasim.runtime.run.graphs import Graphs
from sambasim.runtime.run.replica import input_specs
from sambasim.runtime.transports.connect import connect_here
from sambasim.runtime.values.memory import DeviceMemory, place_weights
from tests.parity.conftest import Variant
from tests.support.eager import EagerReplica

SAMPLES = 11


class Evaluation:
    """An evaluator, and the same model in eager PyTorch, after one batch has changed its running statistics."""

    def __init__(self, path: Path, data: Mapping[str, object] | None = None) -> None:
        self.eager = EagerReplica(path, RunOptions(pef=str(path)))
        self.eager.differentiate(0)
        self.eager.module.eval()
        program, resolved = self.eager.program, self.eager.resolved
        self.storage = private_storage(program.device_bytes)
        memory = DeviceMemory(program, self.storage)
        place_weights(memory, map_weights(path))
        buffers = {s.name for s in program.symbols.values() if s.kind is SymbolKind.BUFFER}
        changed = resolved.model_copy(update={"data": resolved.data.model_copy(update=data)})
        self.evaluator = Evaluator(Graphs(path, read(path), changed), connect_here([memory]))
        self.evaluator.use([{name: tensor for name, tensor in self.eager.state().items() if name in buffers}])
        held_out = open_source(resolved.data, tuple(input_specs(program))).evaluation
        assert held_out is not None
        self.samples = WatchedDataset(held_out, held_out.name, range(SAMPLES))
        self.batch: list[Tensor] = default_collate([held_out[index] for index in range(SAMPLES)])

    def logits(self) -> Tensor:
        inputs = self.batch if self.eager.resolved.loss is None else self.batch[:-1]
        result = self.eager.module(*inputs)
        logits: Tensor = result[1] if isinstance(result, tuple) else result
        return logits.detach()

    def losses(self) -> Tensor:
        """Eager's, `[samples]`."""
        logits, target = self.logits(), self.batch[-1]
        if logits.ndim == 2:
            return F.cross_entropy(logits, target, reduction="none")
        return F.cross_entropy(logits.transpose(1, 2), target, reduction="none").mean(dim=1)


@pytest.mark.parametrize("example", ["digits", "lstm_classifier", "char_gpt"])
def test_sums_and_predictions_are_those_of_eager_over_all_samples(example: str, pefs: Mapping[Variant, Path]) -> None:
    """The loss to 1e-5: eager takes all samples in one batch. What is counted is equal, and padding is left out."""
    for world_size in (1, 2, 3, SAMPLES, SAMPLES + 1):
        one = Evaluation(pefs[example, "sgd", False])
        before, losses, logits = one.storage.copy(), one.losses(), one.logits()
        of_ranks = [list(one.evaluator.infer(one.samples, rank, world_size, seed=0)) for rank in range(world_size)]
        total = sum((sums for of_batches in of_ranks for sums, *_ in of_batches), Sums())
        assert total.samples == SAMPLES
        assert total.loss == pytest.approx(float(losses.double().sum()), rel=1e-5)
        if example == "char_gpt":  # a model with a loss of its own says nothing about classes
            assert (total.correct, total.classified) == (0, 0)
        else:
            assert (total.correct, total.classified) == (int(logits.argmax(1).eq(one.batch[-1]).sum()), SAMPLES)
        assert (one.storage == before).all(), "evaluation has buffers and inputs of its own"
        predicted = torch.cat([outputs for _, (outputs, *_), _ in in_turn(of_ranks)])
        torch.testing.assert_close(predicted, logits, rtol=1e-5, atol=1e-6)


class OfProcesses(Dataset[object]):
    """`dataset`; notes in `folder` which process reads a sample."""

    def __init__(self, dataset: WatchedDataset, folder: Path) -> None:
        self.dataset, self.folder = dataset, folder

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> object:
        (self.folder / str(os.getpid())).touch()
        return self.dataset[index]


def test_evaluations_keep_their_workers(tmp_path: Path, pefs: Mapping[Variant, Path]) -> None:
    one = Evaluation(pefs["digits", "sgd", False], {"workers": 1, "persistent_workers": True, "prefetch_factor": 3})
    samples = WatchedDataset(OfProcesses(one.samples, tmp_path), "noted", range(SAMPLES))
    sums = [[of_batch for of_batch, *_ in one.evaluator.infer(samples, 0, 1, seed=0)] for _ in range(3)]
    assert sums[0] == sums[1] == sums[2]
    assert len(list(tmp_path.iterdir())) == 1
