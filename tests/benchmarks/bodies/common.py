"""What bodies share: they measure on all ranks, and rank 0 prints a line of JSON."""

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from sambasim.options.run import RunOptions
from sambasim.records.metrics import CheckpointRecord, StepRecord, SummaryRecord
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.machine import process
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.mpi import connect
from sambasim.runtime.run.run_observer import RunObserver
from sambasim.runtime.run.setup import set_up
from tests.benchmarks.workloads import Workload

WARM_UP_STEPS = 5


class Clock(RunObserver):
    """When each step ended, and what the runtime says of steps and checkpoints."""

    def __init__(self) -> None:
        self._ended_s: list[float] = []
        self.own_steps_s: list[float] = []
        self.checkpoints_s: list[float] = []

    def stepped(self, step: StepRecord) -> None:
        self.own_steps_s.append(step.step_s)
        self.tick()

    def saved(self, record: CheckpointRecord) -> None:
        self.checkpoints_s.append(record.checkpoint_s)

    def tick(self) -> None:
        self._ended_s.append(time.perf_counter())

    @property
    def steps_s(self) -> list[float]:
        """Seconds from the end of a step to the end of the next, after the warm-up."""
        return [after - before for before, after in pairwise(self._ended_s)][WARM_UP_STEPS:]


def on_all_ranks(measure: Callable[[Communicator], object], threads: int | None = 1) -> None:
    """Prints what `measure` returns on rank 0. `threads`: of a rank, None for as many as a run has."""
    if threads is not None:
        torch.set_num_threads(threads)
    communicator = connect(sys.argv)
    found = measure(communicator)
    if communicator.rank == 0:
        print(json.dumps(found), flush=True)
    communicator.close()


def train(
    pef: Path,
    communicator: Communicator,
    observer: RunObserver,
    steps: int,
    *more: Any,
    accumulation: int = 1,
    **options: Any,
) -> SummaryRecord:
    """So many steps as `sambasim run` does them, after the warm-up. `more`: what a job takes besides an observer."""
    training = {"steps": steps + WARM_UP_STEPS, "accumulation_steps": accumulation}
    chosen = RunOptions(pef=str(pef), overrides={"training": training, "evaluation": {"enabled": False}}, **options)
    return TrainingJob(set_up(pef, chosen, communicator), observer, *more).run().summary


@contextmanager
def gloo(communicator: Communicator) -> Iterator[None]:
    """Within it, torch.distributed has the ranks."""
    process.bring_up(communicator)
    torch.manual_seed(0)
    yield
    gc.collect()  # DDP lies in a cycle. If it outlives its group, gloo's threads may abort as Python ends.
    process.take_down()


def train_eagerly(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batches: Iterator[tuple[Tensor, ...]],
    clock: Clock,
    steps: int,
) -> None:
    """So many steps after the warm-up. `model` returns its loss first. Without an optimizer: forward and backward
    alone."""
    for _ in range(steps + WARM_UP_STEPS):
        model.zero_grad()
        loss, *_ = model(*next(batches))
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        clock.tick()


def batches_of(workload: Workload, rank: int, ranks: int) -> Iterator[tuple[Tensor, ...]]:
    """By a DataLoader, without end."""
    samples = workload.samples()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(samples, ranks, rank, drop_last=True)
    loader = DataLoader(samples, batch_size=workload.batch_size, sampler=sampler, drop_last=True)
    while True:
        yield from loader
