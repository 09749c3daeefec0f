"""Train GPT-2 small for a few steps by the runtime, or by DistributedDataParallel; print what memory the ranks hold.

Each rank reads its proportional set size (Pss: a page that k processes share counts as 1/k in each) after the last
step, and that of its largest mapping, which is its device memory. Rank 0 prints the sum of the first and the largest of
the second, in bytes, as a line of JSON.

    memory.py sambasim|host|ddp PEF      host: sync through the host
"""

import json
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from sambasim.options.run import RunOptions
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.machine import pytorch
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.mpi import connect
from sambasim.runtime.run.run_observer import RunObserver, Step
from sambasim.runtime.run.setup import set_up
from tests.benchmarks.workloads import GPT2_BATCH, GPT2_LENGTH, Gpt2Small

STEPS = 3


class Gauge(RunObserver):
    def __init__(self) -> None:
        self.held_bytes = self.device_bytes = 0

    def stepped(self, step: Step) -> None:
        if step.step == STEPS:
            self.read()

    def read(self) -> None:
        fields = [line.split() for line in Path("/proc/self/smaps").read_text().splitlines()]
        sizes, held = ([int(one[1]) * 1024 for one in fields if one[0] == name] for name in ("Size:", "Pss:"))
        self.held_bytes = sum(held)
        self.device_bytes = held[sizes.index(max(sizes))]


def main(which: str, pef: Path) -> None:
    torch.set_num_threads(1)
    communicator = connect(sys.argv)
    gauge = Gauge()
    if which == "ddp":
        _ddp(communicator, gauge)
    else:
        _ours(pef, communicator, gauge, reduce_on_rdu=which == "sambasim")
    everybody = communicator.all_gather_object((gauge.held_bytes, gauge.device_bytes))
    if communicator.rank == 0:
        held, of_device = zip(*everybody, strict=True)
        print(json.dumps({"held_bytes": sum(held), "device_bytes": max(of_device)}), flush=True)
    communicator.close()


def _ours(pef: Path, communicator: Communicator, gauge: Gauge, *, reduce_on_rdu: bool) -> None:
    overrides: dict[str, object] = {"training": {"steps": STEPS, "evaluate": False}}
    options = RunOptions(pef=str(pef), threads=1, reduce_on_rdu=reduce_on_rdu, overrides=overrides)
    TrainingJob(set_up(pef, options, communicator), gauge).run()


def _ddp(communicator: Communicator, gauge: Gauge) -> None:
    pytorch.bring_up(communicator)
    _train(gauge)
    pytorch.take_down()


def _train(gauge: Gauge) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Gpt2Small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 50257, (GPT2_BATCH, GPT2_LENGTH))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss, _ = model(tokens, tokens)
        loss.backward()
        optimizer.step()
    gauge.read()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
