"""Train GPT-2 small for a few steps by the runtime, or by DistributedDataParallel; print what memory the ranks hold.

Each rank reads its proportional set size (Pss: a page that k processes share counts as 1/k in each) after the last
step. Rank 0 prints the sum, in bytes, as a line of JSON.

    memory.py sambasim|ddp PEF
"""

import json
import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

from sambasim.options.run import RunOptions
from sambasim.runtime import torch_process_group
from sambasim.runtime.communicator import connect
from sambasim.runtime.job import TrainingJob
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.run_observer import RunObserver, Step
from sambasim.runtime.setup import set_up
from tests.benchmarks.workloads import GPT2_BATCH, GPT2_LENGTH, Gpt2Small

STEPS = 3


class Gauge(RunObserver):
    def __init__(self) -> None:
        self.held_bytes = 0

    def stepped(self, step: Step) -> None:
        if step.step == STEPS:
            self.held_bytes = proportional_bytes()


def proportional_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main(which: str, pef: Path) -> None:
    torch.set_num_threads(1)
    communicator = connect(sys.argv)
    held_bytes = _ours(pef, communicator) if which == "sambasim" else _ddp(communicator)
    everybody = communicator.all_gather_object(held_bytes)
    if communicator.rank == 0:
        print(json.dumps({"held_bytes": sum(everybody)}), flush=True)
    communicator.close()


def _ours(pef: Path, communicator: Communicator) -> int:
    gauge = Gauge()
    overrides: dict[str, object] = {"training": {"steps": STEPS, "evaluate": False}}
    options = RunOptions(pef=str(pef), threads=1, reduce_on_rdu=True, overrides=overrides)
    TrainingJob(set_up(pef, options, communicator), gauge).run()
    return gauge.held_bytes


def _ddp(communicator: Communicator) -> int:
    torch_process_group.bring_up(communicator)
    held_bytes = _train()
    torch_process_group.take_down()
    return held_bytes


def _train() -> int:
    torch.manual_seed(0)
    model = DistributedDataParallel(Gpt2Small())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 50257, (GPT2_BATCH, GPT2_LENGTH))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss, _ = model(tokens, tokens)
        loss.backward()
        optimizer.step()
    return proportional_bytes()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
