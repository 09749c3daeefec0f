"""Train every PEF named on the command line by every way, with and without a trace; compare clocks that are set apart.

Rank 0 prints one JSON line for each run: the PEF, its way, the summaries without and with the trace, what was noted,
and the file. The last line has the clocks: of each rank, that is ahead by a second more than that of the rank before.

    trace.py FOLDER STEPS PEF...
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter_ns

from sambasim.options.run import RunOptions
from sambasim.runtime.communicator import connect
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.run_observer import RunObserver
from sambasim.runtime.tracing import compare_clocks

AHEAD_NS = 1_000_000_000


class _Notes(RunObserver):
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def noted(self, what: str) -> None:
        self.notes.append(what)


def main(folder: Path, steps: int, paths: Sequence[Path]) -> None:
    communicator = connect(sys.argv)
    size = communicator.world_size
    ways: dict[str, Mapping[str, object]] = {"alone": {}, "emulated": {"emulate_replicas": 3}}
    if size > 1:
        ways = {
            "device": {"reduce_on_rdu": True},
            "mpi": {},
            "gloo": {"host_sync": "gloo"},
            "server": {"host_sync": "parameter-server"},
            "servers": {"host_sync": "parameter-server", "parameter_servers": 1},
        }
    for path in paths:
        for way, more in ways.items():
            file = folder / f"{path.stem}-{way}-{size}.json"
            plain, _ = _train(path, steps, more, communicator)
            traced, notes = _train(path, steps, {**more, "trace": file}, communicator)
            if communicator.rank == 0:
                facts = {"pef": path.stem, "way": way, "plain": plain, "traced": traced, "notes": notes}
                print(json.dumps({**facts, "file": str(file)}), flush=True)
    _compare(communicator)
    communicator.close()


def _train(
    path: Path, steps: int, more: Mapping[str, object], communicator: Communicator
) -> tuple[object, Sequence[str]]:
    training = {"steps": steps, "evaluate": False, "accumulation_steps": 2}
    options = RunOptions.model_validate({"pef": str(path), "threads": 1, "overrides": {"training": training}, **more})
    observer = _Notes()
    summary = TrainingJob(path, options, communicator, observer).run()
    return summary.model_dump(mode="json"), observer.notes


def _compare(communicator: Communicator) -> None:
    rank = communicator.rank
    together = compare_clocks(communicator)
    found = compare_clocks(communicator, lambda: perf_counter_ns() + rank * AHEAD_NS)
    if rank == 0:
        ahead = [[one.ahead_ns, one.accuracy_ns] for one in found]
        print(json.dumps({"clocks": ahead, "together": [one.ahead_ns for one in together]}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), [Path(name) for name in sys.argv[3:]])
