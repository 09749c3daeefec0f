"""Train every PEF named on the command line, and once more from a checkpoint in the midst of it; print both digests.

With accumulation and a schedule. The checkpoint lies in the midst of the first epoch, and the end in the second. Rank 0
prints one JSON line for each PEF and way to sync.

    resume.py FOLDER PEF...
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sambasim.options.run import CheckpointOptions, RunOptions
from sambasim.pef import peek
from sambasim.runtime.checkpoint.format import check
from sambasim.runtime.communicator import connect
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.run_observer import RunObservers

STEPS, SAVED, EPOCH = 5, 2, 3
"""Optimizer steps of the run, after which of them it goes on, and how many make an epoch."""

ACCUMULATION = 2


def main(folder: Path, paths: Sequence[str]) -> None:
    communicator = connect(sys.argv)
    ways = (True, False) if communicator.world_size > 1 else (False,)
    for path in map(Path, paths):
        for number, way in enumerate(ways):
            saved = folder / f"{path.stem}-{number}"
            whole = _train(path, communicator, way, CheckpointOptions(dir=saved, every="1", keep=STEPS))
            there = saved / f"step-{SAVED:010}"
            # What was written by one way to sync is read by the other.
            again = CheckpointOptions(resume=str(there), exact=True, dir=folder / f"{path.stem}-{number}-again")
            resumed = _train(path, communicator, ways[-1 - number], again)
            if communicator.rank == 0:
                ends = [_shards(place / f"step-{STEPS:010}") for place in (saved, again.dir) if place is not None]
                line = {"name": f"{path.stem} {number}", "whole": [*whole, ends[0]], "resumed": [*resumed, ends[1]]}
                print(json.dumps(line), flush=True)
    communicator.close()


def _shards(path: Path) -> list[str]:
    """The digests of all that a checkpoint holds: the buffers of every replica too, which no other digest covers."""
    return [shard.sha256 for shard in check(path).manifest.shards.values()]


def _train(
    path: Path, communicator: Communicator, reduce_on_rdu: bool, checkpoint: CheckpointOptions
) -> tuple[str, str, float, int]:
    samples = EPOCH * ACCUMULATION * peek(path).batch_size * communicator.world_size + 1
    schedule = {"name": "cosine", "warmup_steps": 2}
    training = {"steps": STEPS, "accumulation_steps": ACCUMULATION, "evaluate": False, "schedule": schedule}
    options = RunOptions(
        pef=str(path),
        threads=1,
        overrides={"training": training, "data": {"source": "synthetic", "samples": samples}},
        checkpoint=checkpoint,
        reduce_on_rdu=reduce_on_rdu,
    )
    summary = TrainingJob(path, options, communicator, RunObservers([])).run()
    return summary.weights_sha256, summary.state_sha256, summary.loss_last, summary.samples


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
