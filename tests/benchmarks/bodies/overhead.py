"""Train the GPT with or without what keeps a run safe, on all ranks; print seconds of steps, and of checkpoints.

    bare           no supervision, and no loss is checked
    watched        as `sambasim run` does it: the status file, the watchdog, the loss of each step
    checkpointed   the same, with a checkpoint now and then

overhead.py FOLDER WAY STEPS EVERY      FOLDER holds gpt/gpt.pef; a checkpoint every so many steps
"""

import sys
import time
from pathlib import Path
from typing import Any

from sambasim.ir.mesh import Mesh
from sambasim.options.run import CheckpointOptions
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.watch.supervisor import Supervisor
from tests.benchmarks.bodies.common import WARM_UP_STEPS, Clock, on_all_ranks, train


def measured(communicator: Communicator, folder: Path, way: str, steps: int, every: str) -> object:
    clock, checkpoint = Clock(), CheckpointOptions()
    saved = communicator.broadcast_object(folder / f"saved-{time.time_ns()}" if communicator.rank == 0 else None)
    if way == "checkpointed":
        checkpoint = CheckpointOptions(dir=saved, every=every)
    bad, pef = "ignore" if way == "bare" else "stop", folder / "gpt" / "gpt.pef"
    with Supervisor(communicator, report=lambda failure: print(failure.error, file=sys.stderr), exit_code=_one) as own:
        if way != "bare":
            own.start([folder], "gpt", 300.0, Mesh({}))
        how: dict[str, Any] = {"reduce_on_rdu": True, "on_nonfinite": bad, "checkpoint": checkpoint}
        train(pef, communicator, clock, steps, own.activity, threads=1, **how)
        own.finish()
    return {"steps_s": clock.own_steps_s[WARM_UP_STEPS:], "checkpoints_s": clock.checkpoints_s}


def _one(error: BaseException) -> int:
    return 1


if __name__ == "__main__":
    chosen = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    on_all_ranks(lambda communicator: measured(communicator, *chosen), threads=None)
