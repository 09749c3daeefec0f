"""Train as often as argv[1] says, a JSON list of `Run`: starting a job takes seconds.

Runs that are `alone` emulate their replicas in one process: they come first, each on one of the ranks. Rank 0 prints
one JSON line for each run, as `tests.mpi.training.Trained` reads it.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from sambasim.options.run import RunOptions
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.machine.communicator import Communicator, single_rank
from sambasim.runtime.machine.mpi import connect
from sambasim.runtime.run.run_observer import RunObserver, Start
from sambasim.runtime.run.setup import set_up
from sambasim.runtime.transports import exchange, links
from sambasim.runtime.transports.window import WindowReduce, _Work


@dataclass(frozen=True, slots=True)
class Run:
    """One training of a PEF.

    alone: by one of the processes, which emulates all replicas
    round_elements: of an exchange through the host; None for the usual number
    short_bytes: of a step between nodes, up to which a rank needs no threads; None for the usual number
    late_s: how late replica 1 is with each group that it reduces and updates through a shared window
    """

    name: str
    pef: str
    options: Mapping[str, object]
    alone: bool = False
    round_elements: int | None = None
    short_bytes: int | None = None
    late_s: float = 0.0


class _Messages(RunObserver):
    def __init__(self) -> None:
        self.sync, self.notices, self.notes = "", list[str](), list[str]()

    def started(self, start: Start) -> None:
        self.sync, self.notices = start.sync, list(start.notices)

    def noted(self, what: str) -> None:
        self.notes.append(what)


on_time = WindowReduce._complete


def train(run: Run, communicator: Communicator) -> dict[str, object]:
    """What `tests.mpi.training.Trained` says of the run."""
    messages = _Messages()

    def late(reduce: WindowReduce, work: _Work) -> None:
        time.sleep(run.late_s if reduce._window.replica == 1 else 0.0)
        on_time(reduce, work)

    elements = run.round_elements or exchange.ROUND_ELEMENTS
    short_bytes = links.SHORT_BYTES if run.short_bytes is None else run.short_bytes
    with (
        patch.object(exchange, "ROUND_ELEMENTS", elements),
        patch.object(links, "SHORT_BYTES", short_bytes),
        patch.object(WindowReduce, "_complete", late if run.late_s else on_time),
    ):
        setup = set_up(Path(run.pef), RunOptions.model_validate(run.options), communicator)
        summary = TrainingJob(setup, messages).run().summary
    return {"name": run.name, **vars(messages), "summary": summary.model_dump(mode="json")}


def main() -> None:
    communicator, runs = connect(sys.argv), [Run(**run) for run in json.loads(sys.argv[1])]
    rank, world_size = communicator.rank, communicator.world_size
    single = single_rank(communicator.host_name, communicator.library)
    emulations = [run for run in runs if run.alone]
    own = [train(run, single) for number, run in enumerate(emulations) if number % world_size == rank]
    done = [one for part in communicator.all_gather_object(own) for one in part]
    done += [train(run, communicator) for run in runs if not run.alone]
    if rank == 0:
        with open(1, "w", closefd=False) as stdout:  # with PYTHONUNBUFFERED, sys.stdout may print only a part
            print("\n".join(map(json.dumps, done)), file=stdout)
    communicator.close()
