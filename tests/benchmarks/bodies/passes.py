"""Forward and backward of one replica, again and again, in one way; print the processor's seconds of each.

The engines take it from a PEF, with gradients in their group; eager PyTorch runs the module itself, and drops its old
gradients before each pass, as `zero_grad(set_to_none=True)` does. One thread. A line of JSON: a list.

    passes.py FOLDER WORKLOAD WAY RUNS      FOLDER holds WORKLOAD/WORKLOAD.pef
"""

import inspect
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sambasim.runtime.engine.executor import Executor, tangent_of
from sambasim.runtime.engine.inductor import Inductor
from sambasim.runtime.machine.process import keep_freed_memory
from sambasim.runtime.transports.in_process import finished
from tests.benchmarks.bodies.common import workload_called
from tests.benchmarks.workloads import Workload
from tests.support.compiled import loaded

WARM_UP_RUNS = 2


def main(path: Path, workload: Workload, way: str, runs: int) -> None:
    torch.set_num_threads(1)
    differentiate = _eager(workload) if way == "eager PyTorch" else _from_pef(path, workload, way)
    times_s = []
    for _ in range(WARM_UP_RUNS + runs):
        began_s = time.process_time()  # what other processes do counts less than by wall clock time
        for _ in range(workload.passes):
            differentiate()
        times_s.append(time.process_time() - began_s)
    print(json.dumps(times_s[WARM_UP_RUNS:]))


def _eager(workload: Workload) -> Callable[[], object]:
    torch.manual_seed(0)
    model, batch = workload.model(), workload.batch()

    def differentiate() -> None:
        model.zero_grad(set_to_none=True)
        torch.autograd.backward(model(*batch)[0])

    return differentiate


def _from_pef(path: Path, workload: Workload, way: str) -> Callable[[], object]:
    keep_freed_memory()  # as a run does
    names = inspect.signature(workload.model().forward).parameters
    program, memory = loaded(path, dict(zip(names, workload.batch(), strict=True)))
    if program.training is None:
        raise ValueError("a PEF without a training step")
    engine = Inductor() if way == "inductor" else None  # as a run does
    executable = Executor(program.training, program, memory.tensor, engine)
    tangent = tangent_of(program, 1.0)
    return lambda: finished(executable.run(tangent))


if __name__ == "__main__":
    chosen = workload_called(sys.argv[2])
    main(Path(sys.argv[1]) / chosen.name / f"{chosen.name}.pef", chosen, sys.argv[3], int(sys.argv[4]))
