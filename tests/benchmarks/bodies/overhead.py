"""Train the GPT with or without what keeps a run safe, on all ranks; print seconds of steps, and of checkpoints.

bare           no supervision, and no loss is checked
watched        as `sambasim run` does it: the status file, the watchdog, the loss of each step
checkpointed   the same, with a checkpoint now and then

overhead.py FOLDER WAY      FOLDER holds gpt/gpt.pef
"""

import sys
import time
from pathlib import Path
from typing import Any

from sambasim.ir.mesh import Mesh
from sambasim.options.run import CheckpointOptions
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.watch.supervisor import Failure, Supervisor
from tests.benchmarks.bodies.common import WARM_UP_STEPS, Clock, on_all_ranks, train
from tests.benchmarks.figures import CHECKPOINT_EVERY, OVERHEAD_STEPS, Overhead


def measured(communicator: Communicator, folder: Path, way: Overhead) -> object:
    clock, checkpoint = Clock(), CheckpointOptions()
    saved = communicator.broadcast_object(folder / f"saved-{time.time_ns()}" if communicator.rank == 0 else None)
    if way is Overhead.CHECKPOINTED:
        checkpoint = CheckpointOptions(dir=saved, every=str(CHECKPOINT_EVERY))
    bad = "ignore" if way is Overhead.BARE else "stop"
    how: dict[str, Any] = {"threads": 1, "reduce_on_rdu": True, "on_nonfinite": bad, "checkpoint": checkpoint}
    with Supervisor(communicator, report=_report, exit_code=lambda error: 1) as supervisor:
        if way is not Overhead.BARE:
            supervisor.start([folder], "gpt", 300.0, Mesh({}))
        pef, activity = folder / "gpt" / "gpt.pef", supervisor.activity
        train(pef, communicator, clock, OVERHEAD_STEPS, activity, **how)
        supervisor.finish()
    return {"steps_s": clock.own_steps_s[WARM_UP_STEPS:], "checkpoints_s": clock.checkpoints_s}


def _report(failure: Failure) -> None:
    print(failure.error, file=sys.stderr)


if __name__ == "__main__":
    chosen = Path(sys.argv[1]), Overhead(sys.argv[2])
    on_all_ranks(lambda communicator: measured(communicator, *chosen), threads=None)
