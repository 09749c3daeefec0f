"""Train the GPT with or without what keeps a run safe, on all ranks; print seconds of steps, and of checkpoints.

bare           no supervision, and no loss is checked
watched        as `sambasim run` does it: the status file, the watchdog, the loss of each step
checkpointed   the same, with a checkpoint now and then

overhead.py FOLDER WAY      FOLDER holds gpt/gpt.pef
"""

import json
import sys
import time
from pathlib import Path

from sambasim.ir.mesh import Mesh
from sambasim.options.run import CheckpointOptions, RunOptions
from sambasim.records.metrics import CheckpointRecord
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.machine.mpi import connect
from sambasim.runtime.run.run_observer import RunObserver, Step
from sambasim.runtime.run.setup import set_up
from sambasim.runtime.watch.supervisor import Failure, Supervisor
from tests.benchmarks.figures import CHECKPOINT_EVERY, OVERHEAD_STEPS, Overhead

WARM_UP_STEPS = 5


class Clock(RunObserver):
    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self.checkpoints_s: list[float] = []

    def stepped(self, step: Step) -> None:
        self.steps_s.append(step.step_s)

    def saved(self, record: CheckpointRecord) -> None:
        self.checkpoints_s.append(record.checkpoint_s)


def main(folder: Path, way: Overhead) -> None:
    communicator, clock = connect(sys.argv), Clock()
    saved = folder / f"saved-{time.time_ns()}" if communicator.rank == 0 else None
    saved = communicator.broadcast_object(saved)
    checkpoint = CheckpointOptions()
    if way is Overhead.CHECKPOINTED:
        checkpoint = CheckpointOptions(dir=saved, every=str(CHECKPOINT_EVERY))
    pef = folder / "gpt" / "gpt.pef"
    options = RunOptions(
        pef=str(pef),
        threads=1,
        reduce_on_rdu=True,
        overrides={"training": {"steps": OVERHEAD_STEPS + WARM_UP_STEPS, "evaluate": False}},
        checkpoint=checkpoint,
        on_nonfinite="ignore" if way is Overhead.BARE else "stop",
    )
    with Supervisor(communicator, report=_report, exit_code=lambda error: 1) as supervisor:
        if way is not Overhead.BARE:
            supervisor.start([folder], "gpt", 300.0, Mesh({}))
        TrainingJob(set_up(pef, options, communicator), clock, supervisor.activity).run()
        supervisor.finish()
    if communicator.rank == 0:
        print(json.dumps({"steps_s": clock.steps_s[WARM_UP_STEPS:], "checkpoints_s": clock.checkpoints_s}), flush=True)
    communicator.close()


def _report(failure: Failure) -> None:
    print(failure.error, file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Overhead(sys.argv[2]))
