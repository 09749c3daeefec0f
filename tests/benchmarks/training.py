"""A whole training step, with sync between devices, against DistributedDataParallel on gloo: its time and memory.

The candidates take turns, round after round. Each round is a job of its own: the runtime makes the C library keep freed
memory, and a peer in the same process would gain from that too.
"""

import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

import torch
from torch.utils.data import default_collate

from sambasim.compiler.compile import compile_model
from sambasim.options.compile import CompileOptions
from sambasim.options.training import DataOptions, ModelOptions, OptimizerOptions, TrainingOptions
from tests.benchmarks.measure import Figure, run_body
from tests.benchmarks.workloads import GPT2_SMALL, WORKLOADS, Way, Workload

REPLICAS, ROUNDS = 2, 4
MEMORY_REPLICAS = 4
GOALS = {"gpt": 1 / 1.4, "mlp": 1 / 4, "logistic_regression": 1 / 8}
COMPILED_GOAL = 1 / 1.25
OVERHEAD_STEPS, OVERHEAD_ROUNDS, CHECKPOINT_EVERY = 40, 5, 10
PROMISED_EVERY = 50
"""The promise is for a checkpoint every 50 steps. More of them are measured, and each counts as one in 50."""
_SESSION = Path(__file__).parent / "bodies" / "session.py"
_TIMEOUT_S = 300


class Overhead(StrEnum):
    """A way to train."""

    BARE = "bare"
    WATCHED = "watched"
    CHECKPOINTED = "checkpointed"


def step_figures() -> Iterator[Figure]:
    """For each workload: seconds of a step."""
    with tempfile.TemporaryDirectory() as folder:
        for workload in WORKLOADS:
            compile_workload(workload, Path(folder))
            yield from _measured(Path(folder), workload)


def compile_workload(workload: Workload, folder: Path) -> Path:
    """Write `folder/NAME/NAME.pef`, and return its path."""
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
    names = inspect.signature(model.forward).parameters
    return compile_model(model, dict(zip(names, batch, strict=True)), options, by_keyword=False).path


def _measured(folder: Path, workload: Workload) -> Iterator[Figure]:
    seconds: dict[Way, list[float]] = {way: [] for way in workload.ways}
    for _ in range(ROUNDS):
        for way in workload.ways:
            seconds[way] += run_body("steps", str(folder), workload.name, way, np=REPLICAS)
    medians = {str(way): statistics.median(values) for way, values in seconds.items()}
    title = f"step of {workload.name}, np {REPLICAS}"
    yield Figure(title, Way.PLAIN, Way.DDP, f"ratio at most {GOALS[workload.name]:.3f}", medians)
    if Way.ALONE in workload.ways:
        yield Figure(title, Way.ALONE, Way.DDP, "none: what is left if sync and optimizer cost nothing", medians)
    if Way.INDUCTOR in workload.ways:
        yield Figure(title, Way.INDUCTOR, Way.DDP_COMPILED, f"ratio at most {COMPILED_GOAL:.3f}", medians)


def memory_figures() -> Iterator[Figure]:
    """GPT-2 small at four replicas with AdamW: the sum of the proportional set sizes of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        pef = compile_workload(GPT2_SMALL, Path(folder))
        ways = ("sambasim", "ddp")
        held = {way: float(run_body("memory", way, str(pef), np=MEMORY_REPLICAS)["held_bytes"]) for way in ways}
    yield Figure("memory, GPT-2 small, np 4", "sambasim", "ddp", "ratio at most 0.55", held, unit="bytes")


def overhead_figures() -> Iterator[Figure]:
    """What stall detection costs in a step, and what a checkpoint every PROMISED_EVERY steps costs."""
    (gpt,) = (workload for workload in WORKLOADS if workload.name == "gpt")
    steps_s: dict[Overhead, list[float]] = {way: [] for way in Overhead}
    checkpoints_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        compile_workload(gpt, Path(folder))
        for _ in range(OVERHEAD_ROUNDS):
            for way in Overhead:
                measured = run_body("overhead", folder, way, np=2)
                steps_s[way] += measured["steps_s"]
                checkpoints_s += measured["checkpoints_s"]
    medians = {str(way): statistics.median(values) for way, values in steps_s.items()}
    yield Figure("step of gpt, np 2", Overhead.WATCHED, Overhead.BARE, "ratio at most 1.01", medians)
    step_s = medians[Overhead.WATCHED]
    shared_s = step_s + statistics.median(checkpoints_s) / PROMISED_EVERY
    title = f"step of gpt, np 2, and a checkpoint every {PROMISED_EVERY}"
    yield Figure(title, "with", "without", "ratio at most 1.03", {"with": shared_s, "without": step_s})


def session_figures() -> Iterator[Figure]:
    """A step of the LeNet app at batch 32, one replica, one thread: `session.run` against the runtime that it calls."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sambasim", str(_SESSION), folder]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr)
    medians = json.loads(result.stdout.splitlines()[-1])
    yield Figure("step of lenet, batch 32", "session.run", "the runtime", "ratio at most 1.05", medians)
