"""Train a PEF as `sambasim run` does; print the seconds of each step, and the memory of the rank with the most.

The memory of a rank is its proportional set size (Pss: a page that k processes share counts as 1/k in each), as if no
other process on the machine used the same libraries: of files, each rank counts an equal share. A line of JSON, from
rank 0: `{"steps_s": [...], "held_bytes": bytes}`.

    plan.py PEF device|host STEPS
"""

import sys
from pathlib import Path

from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.run.run_observer import Step
from tests.benchmarks.bodies.common import WARM_UP_STEPS, Clock, on_all_ranks, train


class Gauge(Clock):
    """`ranks`: of the node."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks = ranks
        self.held_bytes = 0

    def stepped(self, step: Step) -> None:
        super().stepped(step)
        if step.step == WARM_UP_STEPS + 1:
            self.held_bytes = held_bytes(self._ranks)


def held_bytes(ranks: int) -> int:
    total, of_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            path = words[5] if len(words) > 5 else ""  # the columns of a mapping
            of_file = path.startswith("/") and not path.startswith(("/dev/", "/SYSV"))
            private = words[1].endswith("p")
        elif of_file and words[0] == "Rss:":
            total += int(words[1]) * 1024 // ranks
        elif of_file and private and words[0] == "Anonymous:":  # its own copies of pages of the file
            total += int(words[1]) * 1024 - int(words[1]) * 1024 // ranks
        elif not of_file and words[0] == "Pss:":
            total += int(words[1]) * 1024
    return total


def measured(communicator: Communicator, pef: Path, reduce_on_rdu: bool, steps: int) -> object:
    gauge = Gauge(communicator.world_size)
    train(pef, communicator, gauge, steps, reduce_on_rdu=reduce_on_rdu)
    return {"steps_s": gauge.steps_s, "held_bytes": max(communicator.all_gather_object(gauge.held_bytes))}


if __name__ == "__main__":
    chosen = Path(sys.argv[1]), sys.argv[2] == "device", int(sys.argv[3])
    on_all_ranks(lambda communicator: measured(communicator, *chosen), threads=None)
