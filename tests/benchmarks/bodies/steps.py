"""Train one workload in one way, on all ranks; print the seconds of each step, and of checkpoints.

All ways deal out the same data set by a DistributedSampler, one thread a rank. DDP reads it through a DataLoader, and
runs on gloo with torch.optim's defaults, or the fused optimizer, also compiled by torch.compile; one rank has no DDP. A
line of JSON, from rank 0: `{"steps_s": [...], "checkpoints_s": [...]}`.

    steps.py FOLDER WORKLOAD WAY STEPS EVERY      FOLDER holds WORKLOAD/WORKLOAD.pef

Ways of `workloads.Way`; and, with or without what keeps a run safe:

    bare           no supervision, and no loss is checked
    watched        as `sambasim run` does it: the status file, the watchdog, the loss of each step
    checkpointed   the same, with a checkpoint EVERY so many steps
"""

import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from sambasim.ir.mesh import Mesh
from sambasim.options.run import CheckpointOptions
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.process import keep_freed_memory
from sambasim.runtime.watch.supervisor import Failure, Supervisor
from tests.benchmarks.bodies.common import WARM_UP_STEPS, Clock, batches_of, gloo, on_all_ranks, train, train_eagerly
from tests.benchmarks.workloads import SMALL_GPT, WORKLOADS, Way, Workload


def measured(communicator: Communicator, folder: Path, name: str, way: str, steps: int, every: str) -> object:
    workload = next(one for one in (*WORKLOADS, SMALL_GPT) if one.name == name)
    clock, pef = Clock(), folder / name / f"{name}.pef"
    batches = batches_of(workload, communicator.rank, communicator.world_size)
    how: dict[str, Any] = {"reduce_on_rdu": way != Way.HOST, **({"wire": "bf16"} if way == Way.WIRE else {})}
    match way:
        case Way.PLAIN | Way.HOST | Way.WIRE | Way.INDUCTOR:
            engine = "inductor" if way == Way.INDUCTOR else "plain"
            train(pef, communicator, clock, steps, threads=1, engine=engine, **how)
        case Way.DDP | Way.DDP_FUSED | Way.DDP_BF16 | Way.DDP_COMPILED:
            with gloo(communicator):
                alone, compiled = workload.model(), way == Way.DDP_COMPILED
                parallel = DistributedDataParallel(alone) if communicator.world_size > 1 else alone
                if way == Way.DDP_BF16:
                    cast(DistributedDataParallel, parallel).register_comm_hook(None, in_bf16)
                model = cast(nn.Module, torch.compile(parallel)) if compiled else parallel
                train_eagerly(model, _optimizer(workload, parallel, way != Way.DDP), batches, clock, steps)
        case Way.BFLOAT16 | Way.AUTOCAST:
            torch.manual_seed(0)
            model = Autocast(workload.model()) if way == Way.AUTOCAST else workload.model().bfloat16()
            train_eagerly(model, _optimizer(workload, model, True), batches, clock, steps)
        case Way.ALONE:
            keep_freed_memory()  # as a run does
            torch.manual_seed(0)
            train_eagerly(workload.model(), None, batches, clock, steps)
        case _:
            where = communicator.broadcast_object(
                folder / f"saved-{time.time_ns()}" if communicator.rank == 0 else None
            )
            if way == "checkpointed":
                how["checkpoint"] = CheckpointOptions(dir=where, every=every)
            with Supervisor(communicator, report=_report, exit_code=lambda error: 1) as own:
                if way != "bare":
                    own.start(folder / name, folder, 300.0, Mesh({}))
                bad = "ignore" if way == "bare" else "stop"
                train(pef, communicator, clock, steps, own.activity, threads=1, on_nonfinite=bad, **how)
                own.finish()
            return {"steps_s": clock.own_steps_s[WARM_UP_STEPS:], "checkpoints_s": clock.checkpoints_s}
    return {"steps_s": clock.steps_s, "checkpoints_s": []}


def in_bf16(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """By its name, DDP refuses torch's own hook on gloo, which can add bfloat16."""
    return bf16_compress_hook(cast(Any, state), bucket)


class Autocast(nn.Module):
    """The forward of `model` in bfloat16, by PyTorch's autocast."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*inputs)


def _report(failure: Failure) -> None:
    print(failure.error, file=sys.stderr)


def _optimizer(workload: Workload, model: nn.Module, fused: bool) -> torch.optim.Optimizer:
    if workload.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=workload.learning_rate, fused=fused or None)
    return torch.optim.SGD(model.parameters(), lr=workload.learning_rate)


if __name__ == "__main__":
    chosen = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]
    on_all_ranks(lambda communicator: measured(communicator, *chosen))
