"""A whole training step at two replicas, with sync between devices, against DistributedDataParallel on gloo.

The ways take turns, round after round. Each round is a job of its own: the runtime tells the C library to keep freed
memory, and in the same process the peer would be given that too.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import default_collate

from sambasim.compiler.compile import compile_model
from sambasim.options.compile import CompileOptions
from sambasim.options.training import DataOptions, ModelOptions, OptimizerOptions, TrainingOptions
from tests.benchmarks.measure import Figure
from tests.benchmarks.workloads import WORKLOADS, Way, Workload
from tests.support.mpi import mpirun

REPLICAS, ROUNDS = 2, 4
GOALS = {"gpt": 1 / 1.4, "mlp": 1 / 4, "logistic_regression": 1 / 8}
COMPILED_GOAL = 1 / 1.25
_TIMEOUT_S = 1800


def figures() -> Iterator[Figure]:
    """For each workload: seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        for workload in WORKLOADS:
            compile_workload(workload, Path(folder))
            yield from _measured(Path(folder), workload)


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


def _measured(folder: Path, workload: Workload) -> Iterator[Figure]:
    seconds: dict[Way, list[float]] = {way: [] for way in workload.ways}
    for _ in range(ROUNDS):
        for way in workload.ways:
            seconds[way] += _steps_s(folder, workload, way)
    medians = {str(way): statistics.median(values) for way, values in seconds.items()}
    title = f"step of {workload.name}, np {REPLICAS}"
    yield Figure(title, Way.PLAIN, Way.DDP, f"ratio at most {GOALS[workload.name]:.3f}", medians)
    if Way.ALONE in workload.ways:
        yield Figure(title, Way.ALONE, Way.DDP, "none: what is left if sync and optimizer cost nothing", medians)
    if Way.INDUCTOR in workload.ways:
        yield Figure(title, Way.INDUCTOR, Way.DDP_COMPILED, f"ratio at most {COMPILED_GOAL:.3f}", medians)


def _steps_s(folder: Path, workload: Workload, way: Way) -> list[float]:
    """Seconds of each step of one round, in a job of its own."""
    body = [sys.executable, "-m", "tests.benchmarks.bodies.steps", str(folder), workload.name, way]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [mpirun(), "-np", str(REPLICAS), *body]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr)
    steps_s: list[float] = json.loads(result.stdout)
    return steps_s
