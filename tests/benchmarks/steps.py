"""A whole training step at two replicas, with sync between devices, against DistributedDataParallel on gloo."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import default_collate

from sambasim.compiler.compile import compile_model
from sambasim.options.compile import CompileOptions
from sambasim.options.data import DataOptions
from sambasim.options.training import ModelOptions, OptimizerOptions, TrainingOptions
from tests.benchmarks.measure import Figure
from tests.benchmarks.workloads import WORKLOADS, Workload
from tests.support.mpi import mpirun

REPLICAS, ROUNDS = 2, 5
GOALS = {"gpt": 1 / 1.4, "mlp": 1 / 4, "logistic_regression": 1 / 8}
COMPILED_GOAL = 1 / 1.25
_TIMEOUT_S = 1800


def figures() -> Iterator[Figure]:
    """One for each workload: seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        for workload in WORKLOADS:
            compile_workload(workload, Path(folder))
        yield from _measured(Path(folder))


def compile_workload(workload: Workload, folder: Path) -> None:
    """Write `folder/NAME/NAME.pef`."""
    torch.manual_seed(0)
    model, samples = workload.model(), workload.samples()
    batch = default_collate([samples[index] for index in range(workload.batch_size)])
    where = "tests.benchmarks.workloads"
    options = CompileOptions(
        model=ModelOptions(target=f"{where}:{workload.model.__name__}"),
        data=DataOptions(source=f"{where}:{workload.samples.__name__}"),
        optimizer=OptimizerOptions(name=workload.optimizer, lr=workload.learning_rate),
        training=TrainingOptions(batch_size=workload.batch_size),
        pef_name=workload.name,
        output_folder=folder,
        data_parallel=True,
        world_size=REPLICAS,
    )
    names = ("tokens", "targets") if workload.name == "gpt" else ("x", "target")
    compile_model(model, dict(zip(names, batch, strict=True)), options, by_keyword=False)


def _measured(folder: Path) -> Iterator[Figure]:
    names = [workload.name for workload in WORKLOADS]
    body = [sys.executable, "-m", "tests.benchmarks.bodies.steps", str(folder), str(ROUNDS), *names]
    command = [mpirun(), "-np", str(REPLICAS), *body]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr)
    for line in result.stdout.splitlines():
        measured = json.loads(line)
        name = measured["workload"]
        goal = f"ratio at most {GOALS[name]:.3f}"
        title = f"step of {name}, np {REPLICAS}"
        medians = measured["medians_s"]
        yield Figure(title, "sambasim", "DDP", goal, medians)
        if "sambasim, inductor" in medians:
            goal = f"ratio at most {COMPILED_GOAL:.3f}"
            yield Figure(title, "sambasim, inductor", "DDP, compiled and fused", goal, medians)
