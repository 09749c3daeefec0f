"""Train every PEF named on the command line by every way through the host, beside device sync and emulations.

One job runs them all, because starting a job costs seconds. Rank 0 prints one JSON line for each run: the PEF, which
way it went, what it said at the start, and its summary. An emulation plays as many replicas as the run with as many
dedicated servers has; it is asked for gloo as well, which it has no use for.

    host_sync.py STEPS PEF...
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from sambasim.options.run import RunOptions
from sambasim.runtime.communicator import connect
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.run_observer import RunObserver, Start
from sambasim.runtime.single_rank import single_rank
from sambasim.runtime.transports import exchange

SMALL_ROUND_ELEMENTS = 1024

Run: TypeAlias = dict[str, object]


def main(steps: int, paths: Sequence[Path]) -> None:
    communicator = connect(sys.argv)
    rank, world_size = communicator.topology.rank, communicator.topology.world_size
    alone = single_rank(communicator.topology.host_name, communicator.library)
    dedicated = range(1, min(world_size, 3))
    ways: dict[str, Mapping[str, object]] = {
        "device": {"reduce_on_rdu": True},
        "mpi": {},
        "gloo": {"host_sync": "gloo"},
        "server": {"host_sync": "parameter-server"},
        **{f"servers {n}": {"host_sync": "parameter-server", "parameter_servers": n} for n in dedicated},
    }
    whole_rounds = exchange.ROUND_ELEMENTS
    for path in paths:
        emulated: dict[str, Run] = {}
        for servers in (0, *dedicated):
            if servers % world_size == rank:
                asked = {"emulate_replicas": world_size - servers, "host_sync": "gloo"}
                emulated[f"emulated {servers}"] = _train(path, steps, asked, alone)
        runs = {way: run for part in communicator.all_gather_object(emulated) for way, run in part.items()}
        runs |= {way: _train(path, steps, more, communicator) for way, more in ways.items()}
        exchange.ROUND_ELEMENTS = SMALL_ROUND_ELEMENTS
        for way in ("mpi", "server"):
            runs[f"{way} in many rounds"] = _train(path, steps, ways[way], communicator)
        exchange.ROUND_ELEMENTS = whole_rounds
        if rank == 0:
            for way, run in runs.items():
                print(json.dumps({"pef": path.stem, "way": way, **run}), flush=True)
    communicator.close()


class _Notices(RunObserver):
    """Keeps what was said at the start."""

    sync = ""
    notices: Sequence[str] = ()

    def started(self, start: Start) -> None:
        self.sync, self.notices = start.sync, start.notices


def _train(path: Path, steps: int, more: Mapping[str, object], communicator: Communicator) -> Run:
    options = RunOptions.model_validate(
        {"pef": str(path), "threads": 1, "overrides": {"training": {"steps": steps}}, **more}
    )
    observer = _Notices()
    summary = TrainingJob(path, options, communicator, observer).run()
    return {"sync": observer.sync, "notices": list(observer.notices), "summary": summary.model_dump()}


if __name__ == "__main__":
    main(int(sys.argv[1]), [Path(path) for path in sys.argv[2:]])
