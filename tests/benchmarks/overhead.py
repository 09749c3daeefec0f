"""What it costs to keep a run safe: the watch over its ranks, and its checkpoints. At two replicas, on the GPT.

The ways take turns, round after round, each round a job of its own.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from tests.benchmarks.measure import Figure
from tests.benchmarks.workloads import WORKLOADS
from tests.support.mpi import mpirun

STEPS, ROUNDS, CHECKPOINT_EVERY = 40, 5, 10
PROMISED_EVERY = 50
"""The promise is about a checkpoint every 50 steps; the figure is of more of them, each counted as one in 50."""

_TIMEOUT_S = 600


class Overhead(StrEnum):
    """A way to train."""

    BARE = "bare"
    WATCHED = "watched"
    CHECKPOINTED = "checkpointed"


def figures() -> Iterator[Figure]:
    """The seconds of a step, and of a step with its share of a checkpoint."""
    from tests.benchmarks.steps import compile_workload

    (gpt,) = (workload for workload in WORKLOADS if workload.name == "gpt")
    steps_s: dict[Overhead, list[float]] = {way: [] for way in Overhead}
    checkpoints_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        compile_workload(gpt, Path(folder))
        for _ in range(ROUNDS):
            for way in Overhead:
                measured = _round(Path(folder), way)
                steps_s[way] += measured["steps_s"]
                checkpoints_s += measured["checkpoints_s"]
    medians = {str(way): statistics.median(values) for way, values in steps_s.items()}
    yield Figure("step of gpt, np 2", Overhead.WATCHED, Overhead.BARE, "ratio at most 1.01", medians)
    step_s = medians[Overhead.WATCHED]
    shared_s = step_s + statistics.median(checkpoints_s) / PROMISED_EVERY
    title = f"step of gpt, np 2, and a checkpoint every {PROMISED_EVERY}"
    yield Figure(title, "with", "without", "ratio at most 1.03", {"with": shared_s, "without": step_s})


def _round(folder: Path, way: Overhead) -> dict[str, list[float]]:
    body = [sys.executable, "-m", "tests.benchmarks.bodies.overhead", str(folder), way]
    command = [mpirun(), "-np", "2", *body]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr)
    measured: dict[str, list[float]] = json.loads(result.stdout.splitlines()[-1])
    return measured
