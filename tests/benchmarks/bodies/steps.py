"""Train one workload in one way, on all ranks; print the seconds of each step.

All ways deal out the same data set by a DistributedSampler, one thread a rank. DDP reads it through a DataLoader, and
runs on gloo with torch.optim's defaults, or compiled by torch.compile with the fused optimizer. Forward and backward
alone sync nothing and update nothing. A line of JSON, from rank 0: a list.

    steps.py FOLDER WORKLOAD WAY      FOLDER holds WORKLOAD/WORKLOAD.pef
"""

import gc
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from sambasim.options.run import RunOptions
from sambasim.runtime.engine.choice import EngineName
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.machine import torch_process_group
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.mpi import connect
from sambasim.runtime.machine.resources import keep_freed_memory
from sambasim.runtime.run.run_observer import RunObserver, Step
from sambasim.runtime.run.setup import set_up
from tests.benchmarks.workloads import WORKLOADS, Way, Workload

WARM_UP_STEPS = 5


class Clock(RunObserver):
    def __init__(self) -> None:
        self._ended_s: list[float] = []

    def stepped(self, step: Step) -> None:
        self.tick()

    def tick(self) -> None:
        self._ended_s.append(time.perf_counter())

    @property
    def steps_s(self) -> list[float]:
        """Seconds from the end of a step to the end of the next, after the warm-up."""
        pairs = zip(self._ended_s, self._ended_s[1:], strict=False)
        return [after - before for before, after in pairs][WARM_UP_STEPS:]


def main(folder: Path, workload: Workload, way: Way) -> None:
    torch.set_num_threads(1)
    communicator = connect(sys.argv)
    clock = Clock()
    match way:
        case Way.PLAIN | Way.INDUCTOR:
            engine: EngineName = "plain" if way is Way.PLAIN else "inductor"
            _ours(folder / workload.name / f"{workload.name}.pef", workload, communicator, engine, clock)
        case Way.DDP | Way.DDP_COMPILED:
            torch_process_group.bring_up(communicator)
            _ddp(workload, communicator, way is Way.DDP_COMPILED, clock)
            gc.collect()  # DDP lies in a cycle. If it outlives its group, gloo's threads may abort as Python ends.
            torch_process_group.take_down()
        case Way.ALONE:
            keep_freed_memory()  # as a run does
            _alone(workload, communicator, clock)
    if communicator.rank == 0:
        print(json.dumps(clock.steps_s), flush=True)
    communicator.close()


def _ours(pef: Path, workload: Workload, communicator: Communicator, engine: EngineName, clock: Clock) -> None:
    training = {"steps": workload.steps + WARM_UP_STEPS, "evaluate": False}
    overrides: dict[str, object] = {"training": training}
    options = RunOptions(pef=str(pef), threads=1, reduce_on_rdu=True, engine=engine, overrides=overrides)
    TrainingJob(set_up(pef, options, communicator), clock).run()


def _ddp(workload: Workload, communicator: Communicator, compiled: bool, clock: Clock) -> None:
    torch.manual_seed(0)
    parallel = DistributedDataParallel(workload.model())
    optimizer = _optimizer(workload, parallel, fused=compiled)
    model = torch.compile(parallel) if compiled else parallel
    batches = _batches(workload, communicator)
    for _ in range(workload.steps + WARM_UP_STEPS):
        optimizer.zero_grad()
        loss, *_ = model(*next(batches))
        loss.backward()
        optimizer.step()
        clock.tick()


def _alone(workload: Workload, communicator: Communicator, clock: Clock) -> None:
    torch.manual_seed(0)
    model = workload.model()
    batches = _batches(workload, communicator)
    for _ in range(workload.steps + WARM_UP_STEPS):
        model.zero_grad()
        loss, *_ = model(*next(batches))
        loss.backward()
        clock.tick()


def _optimizer(workload: Workload, model: nn.Module, *, fused: bool) -> torch.optim.Optimizer:
    if workload.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=workload.learning_rate, fused=fused or None)
    return torch.optim.SGD(model.parameters(), lr=workload.learning_rate)


def _batches(workload: Workload, communicator: Communicator) -> Iterator[tuple[Tensor, ...]]:
    samples = workload.samples()
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        samples, communicator.world_size, communicator.rank, drop_last=True
    )
    loader = DataLoader(samples, batch_size=workload.batch_size, sampler=sampler, drop_last=True)
    while True:
        yield from loader


if __name__ == "__main__":
    chosen = next(workload for workload in WORKLOADS if workload.name == sys.argv[2])
    main(Path(sys.argv[1]), chosen, Way(sys.argv[3]))
