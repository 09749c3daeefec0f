"""Train one workload in one way, on all ranks; print the seconds of each step.

All ways deal out the same data set by a DistributedSampler, one thread a rank. DDP reads it through a DataLoader, and
runs on gloo with torch.optim's defaults, or compiled by torch.compile with the fused optimizer. Forward and backward
alone sync nothing and update nothing. A line of JSON, from rank 0: a list.

    steps.py FOLDER WORKLOAD WAY      FOLDER holds WORKLOAD/WORKLOAD.pef
"""

import sys
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.resources import keep_freed_memory
from tests.benchmarks.bodies.common import Clock, batches_of, gloo, on_all_ranks, train, train_eagerly, workload_called
from tests.benchmarks.workloads import Way, Workload


def measured(communicator: Communicator, folder: Path, workload: Workload, way: Way) -> list[float]:
    clock, batches = Clock(), batches_of(workload, communicator.rank, communicator.world_size)
    match way:
        case Way.PLAIN | Way.INDUCTOR:
            pef, engine = folder / workload.name / f"{workload.name}.pef", "plain" if way is Way.PLAIN else "inductor"
            train(pef, communicator, clock, workload.steps, threads=1, reduce_on_rdu=True, engine=engine)
        case Way.DDP | Way.DDP_COMPILED:
            with gloo(communicator):
                parallel, compiled = DistributedDataParallel(workload.model()), way is Way.DDP_COMPILED
                model = cast(nn.Module, torch.compile(parallel)) if compiled else parallel
                train_eagerly(model, _optimizer(workload, parallel, compiled), batches, clock, workload.steps)
        case Way.ALONE:
            keep_freed_memory()  # as a run does
            torch.manual_seed(0)
            train_eagerly(workload.model(), None, batches, clock, workload.steps)
    return clock.steps_s


def _optimizer(workload: Workload, model: nn.Module, compiled: bool) -> torch.optim.Optimizer:
    if workload.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=workload.learning_rate, fused=compiled or None)
    return torch.optim.SGD(model.parameters(), lr=workload.learning_rate)


if __name__ == "__main__":
    chosen = Path(sys.argv[1]), workload_called(sys.argv[2]), Way(sys.argv[3])
    on_all_ranks(lambda communicator: measured(communicator, *chosen))
