"""Train for a few steps; print the seconds of each step, and what memory the ranks hold, as a line of JSON from rank 0.

The memory of a rank is its proportional set size (Pss: a page that k processes share counts as 1/k in each), and
that of its largest mapping, which is its device memory, after the warm-up and a step: `held_bytes` of all ranks,
`device_bytes` of the rank with the most. `alone_bytes`, also of the rank with the most, is as if no other process on
the machine used the same libraries: of files, each rank counts an equal share.

    memory.py ddp|PEF device|host STEPS THREADS      ddp: GPT-2 small by DistributedDataParallel
"""

import sys
from itertools import repeat
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from sambasim.runtime.machine.communicator import Communicator
from tests.benchmarks.bodies.common import WARM_UP_STEPS, Clock, gloo, on_all_ranks, train, train_eagerly
from tests.benchmarks.workloads import GPT2_BATCH, GPT2_LENGTH, Gpt2Small


class Gauge(Clock):
    """`ranks`: of the node."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self._ranks, self._steps = ranks, 0
        self.held_bytes = self.device_bytes = self.alone_bytes = 0

    def tick(self) -> None:
        super().tick()
        self._steps += 1
        if self._steps == WARM_UP_STEPS + 1:
            self._read()

    def _read(self) -> None:
        of_file, largest = False, 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            words = line.split()
            if not words[0].endswith(":"):
                path = words[5] if len(words) > 5 else ""  # the columns of a mapping
                of_file = path.startswith("/") and not path.startswith(("/dev/", "/SYSV"))
                private = words[1].endswith("p")
                continue
            size_bytes = int(words[1]) * 1024 if words[0] in ("Size:", "Rss:", "Pss:", "Anonymous:") else 0
            if words[0] == "Size:":
                is_largest, largest = size_bytes > largest, max(size_bytes, largest)
            elif words[0] == "Pss:":
                self.held_bytes += size_bytes
                self.alone_bytes += 0 if of_file else size_bytes
                self.device_bytes = size_bytes if is_largest else self.device_bytes
            elif of_file and words[0] == "Rss:":
                self.alone_bytes += size_bytes // self._ranks
            elif of_file and private and words[0] == "Anonymous:":  # its own copies of pages of the file
                self.alone_bytes += size_bytes - size_bytes // self._ranks


def measured(communicator: Communicator, pef: str, path: str, steps: int, threads: int | None) -> object:
    gauge = Gauge(communicator.world_size)
    if pef == "ddp":
        with gloo(communicator):
            model = DistributedDataParallel(Gpt2Small())
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            tokens = torch.randint(0, 50257, (GPT2_BATCH, GPT2_LENGTH))
            train_eagerly(model, optimizer, repeat((tokens, tokens)), gauge, steps)
    else:
        train(Path(pef), communicator, gauge, steps, threads=threads, reduce_on_rdu=path == "device")
    sizes = (gauge.held_bytes, gauge.device_bytes, gauge.alone_bytes)
    held, of_device, alone = zip(*communicator.all_gather_object(sizes), strict=True)
    found = {"held_bytes": sum(held), "device_bytes": max(of_device), "alone_bytes": max(alone)}
    return {"steps_s": gauge.steps_s, **found}


if __name__ == "__main__":
    few = int(sys.argv[4]) if sys.argv[4:] else None
    chosen = sys.argv[1], sys.argv[2], int(sys.argv[3]), few
    on_all_ranks(lambda communicator: measured(communicator, *chosen), threads=few)
