"""Train `SplitGPT` on all ranks by one kind of parallelism, ours or PyTorch's on gloo; print the seconds of each step.

One thread a rank. A line of JSON, from rank 0: `{"steps_s": [...], "waited_s": seconds of a mean step}`; PyTorch does
not say how long it waits.

    parallel.py WAY PEF ACCUMULATION      PEF is for our ways and gloo, ACCUMULATION for ours
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from sambasim.ir.dataflow import groups_of
from sambasim.ir.ranks import in_slices
from sambasim.pef import read
from sambasim.runtime.machine.communicator import Communicator
from tests.benchmarks.bodies.common import WARM_UP_STEPS, Clock, gloo, on_all_ranks, train, train_eagerly
from tests.benchmarks.workloads import PIPELINED_MICRO_BATCHES, SPLIT_GPT, ParallelWay, SplitGPT

STEPS = 10
STAGES = 2


def measured(communicator: Communicator, way: ParallelWay, pef: Path, accumulation: int) -> object:
    clock, waited_s = Clock(), 0.0
    if way is ParallelWay.OURS:
        summary = train(pef, communicator, clock, STEPS, accumulation=accumulation, threads=1)
        in_sync_s = summary.sync_share * summary.training_s
        waited_s = (in_sync_s + sum(summary.waited_s.values())) / summary.steps
    else:
        with gloo(communicator):
            if way is ParallelWay.GLOO:
                _communications(pef, communicator.world_size, clock)
            elif way is ParallelWay.PIPELINING:
                _pipelining(communicator.rank, clock)
            else:
                _sharded(way, communicator.world_size, clock)
    return {"steps_s": clock.steps_s, "waited_s": waited_s}


def _pipelining(rank: int, clock: Clock) -> None:
    """1F1B of torch.distributed.pipelining, with two equal stages."""
    model = SplitGPT()
    half = len(model.blocks) // STAGES
    stages = (model.first, *model.blocks[:half]), (*model.blocks[half:], model.last)
    part = nn.Sequential(*stages[rank])
    optimizer = torch.optim.AdamW(part.parameters(), lr=SPLIT_GPT.learning_rate)
    stage = PipelineStage(part, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, PIPELINED_MICRO_BATCHES, loss_fn=_loss)
    for tokens, targets in _batches(PIPELINED_MICRO_BATCHES):
        optimizer.zero_grad()
        _ = schedule.step(tokens) if rank == 0 else schedule.step(target=targets)
        optimizer.step()
        clock.tick()


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _sharded(way: ParallelWay, ranks: int, clock: Clock) -> None:
    """DTensor: columns, then rows, in each block; embeddings and head are whole. Or FSDP2."""
    model, mesh = SplitGPT(), init_device_mesh("cpu", (ranks,))
    for block in model.layers:
        if way is ParallelWay.DTENSOR:
            columns = dict.fromkeys(("query", "key", "value", "mlp.0"), ColwiseParallel())
            parallelize_module(block, mesh, {**columns, "proj": RowwiseParallel(), "mlp.2": RowwiseParallel()})
            block.heads //= ranks
        else:
            fully_shard(block, mesh=mesh)
    if way is ParallelWay.FSDP2:
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=SPLIT_GPT.learning_rate)
    train_eagerly(model, optimizer, _batches(1), clock, STEPS)


def _communications(pef: Path, ranks: int, clock: Clock) -> None:
    """The collectives of one step of `pef`, with its sizes, one after another."""
    program = in_slices(read(pef).program)
    training = program.training
    if training is None:
        raise ValueError(f"{pef} has no training step")
    groups = {group.name: group for group in program.groups}
    calls: list[Callable[[], object]] = []
    for node in training.nodes:
        if not node.operator.startswith("comm."):
            continue
        of_group = [groups[name] for name in groups_of(node)]
        numel = of_group[0].numel if of_group else training.values[node.results[0] or ""].numel
        whole, part = torch.ones(-(-numel // ranks) * ranks), torch.ones(-(-numel // ranks))
        match node.operator:
            case "comm.all_reduce":
                calls.append(partial(dist.all_reduce, whole))
            case "comm.all_gather":
                calls.append(partial(dist.all_gather_into_tensor, whole, part))
            case "comm.reduce_scatter":
                calls.append(partial(dist.reduce_scatter_tensor, part, whole))
    for _ in range(STEPS + WARM_UP_STEPS):
        for call in calls:
            call()
        clock.tick()


def _batches(parts: int) -> Iterator[tuple[Any, ...]]:
    """Batches of `parts` micro-batches, the same on all ranks."""
    samples, size = SPLIT_GPT.samples(), SPLIT_GPT.batch_size * parts
    for step in range(STEPS + WARM_UP_STEPS):
        rows = [samples[(step * size + row) % len(samples)] for row in range(size)]  # type: ignore[arg-type]  # a Dataset need not have a length; this one has
        yield tuple(torch.stack(column) for column in zip(*rows, strict=True))


if __name__ == "__main__":
    chosen = ParallelWay(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    on_all_ranks(lambda communicator: measured(communicator, *chosen))
