"""Train every PEF named on the command line by device sync, by host sync, and by emulation; print the digests.

One job runs them all, because starting a job costs seconds. Emulations are dealt out to the ranks, each of which plays
all replicas of its own alone. Rank 0 prints one JSON line for each configuration.

    exactness.py STEPS THREADS PEF...
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from sambasim.options.run import RunOptions
from sambasim.records.metrics import SummaryRecord
from sambasim.runtime.communicator import connect
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.run_observer import RunObservers
from sambasim.runtime.single_rank import single_rank

Digests = tuple[str, str, float]


def main(steps: int, threads: int, paths: Sequence[str]) -> None:
    communicator = connect(sys.argv)
    rank, world_size = communicator.topology.rank, communicator.topology.world_size
    alone = single_rank(communicator.topology.host_name, communicator.library)
    configurations = [(Path(path), accumulation) for path in paths for accumulation in (1, 2)]
    emulated: dict[str, Digests] = {}
    for number, (path, accumulation) in enumerate(configurations):
        if number % world_size == rank:
            options = _options(path, accumulation, steps, threads, emulate_replicas=world_size)
            emulated[f"{path.stem} ×{accumulation}"] = _train(path, options, alone)
    of_all = {name: digests for part in communicator.all_gather_object(emulated) for name, digests in part.items()}
    for path, accumulation in configurations:
        name = f"{path.stem} ×{accumulation}"
        device = _train(path, _options(path, accumulation, steps, threads, reduce_on_rdu=True), communicator)
        host = _train(path, _options(path, accumulation, steps, threads), communicator)
        if rank == 0:
            print(json.dumps({"name": name, "device": device, "host": host, "emulated": of_all[name]}), flush=True)
    communicator.close()


def _options(
    path: Path,
    accumulation: int,
    steps: int,
    threads: int,
    *,
    reduce_on_rdu: bool = False,
    emulate_replicas: int | None = None,
) -> RunOptions:
    return RunOptions(
        pef=str(path),
        threads=threads,
        reduce_on_rdu=reduce_on_rdu,
        emulate_replicas=emulate_replicas,
        overrides={"training": {"steps": steps, "accumulation_steps": accumulation, "evaluate": False}},
    )


def _train(path: Path, options: RunOptions, communicator: Communicator) -> Digests:
    summary: SummaryRecord = TrainingJob(path, options, communicator, RunObservers([])).run()
    return summary.weights_sha256, summary.state_sha256, summary.loss_last


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
