"""Forward and backward of one replica, gradients in their groups, against the same module in eager PyTorch.

The ways take turns, round after round, each in a process of its own: the runtime tells the C library to keep freed
memory, and in the same process eager PyTorch would be given that too.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from sambasim.compiler.compile import compile_model
from sambasim.options.compile import CompileOptions
from sambasim.options.training import LossOptions, ModelOptions, OptimizerOptions, TrainingOptions
from tests.benchmarks.measure import Figure
from tests.benchmarks.subjects import SUBJECTS, Subject
from tests.support.mpi import ROOT

ROUNDS, RUNS = 9, 6
_TIMEOUT_S = 600
_PEER = "eager PyTorch"


def figures() -> Iterator[Figure]:
    """A GPT of 10.7 million parameters by both engines, and a logistic regression at batch 1, many times over."""
    with tempfile.TemporaryDirectory() as folder:
        gpt, regression = SUBJECTS["gpt"], SUBJECTS["logistic_regression"]
        goals = {"plain engine": "ratio at most 1.01", "inductor": "ratio at most 0.92"}
        yield from _measured(Path(folder), gpt, "forward and backward of a GPT", goals)
        title = f"{regression.passes} times forward and backward of a logistic regression at batch 1"
        yield from _measured(Path(folder), regression, title, {"plain engine": "ratio below 0.3"})


def _measured(folder: Path, subject: Subject, title: str, goals: dict[str, str]) -> Iterator[Figure]:
    _compile(subject, folder / subject.name)
    seconds: dict[str, list[float]] = {way: [] for way in (*goals, _PEER)}
    for _ in range(ROUNDS):
        for way, values in seconds.items():
            values += _passes_s(folder, subject, way)
    medians = {way: statistics.median(values) for way, values in seconds.items()}
    for way, goal in goals.items():
        yield Figure(title, way, _PEER, goal, medians)


def _compile(subject: Subject, folder: Path) -> None:
    inputs = subject.inputs()
    options = CompileOptions(
        model=ModelOptions(target="net:Net"),
        loss=LossOptions(name=subject.loss) if subject.loss else None,
        optimizer=OptimizerOptions(name="adamw"),
        training=TrainingOptions(batch_size=next(iter(inputs.values())).shape[0]),
        pef_name=subject.name,
        output_folder=folder.parent,
        data_parallel=True,
    )
    compile_model(subject.model(), inputs, options, by_keyword=False)


def _passes_s(folder: Path, subject: Subject, way: str) -> Sequence[float]:
    """Seconds of each run of one round."""
    body = [sys.executable, "-m", "tests.benchmarks.bodies.passes", str(folder), subject.name, way, str(RUNS)]
    result = subprocess.run(body, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr)
    times_s: list[float] = json.loads(result.stdout)
    return times_s
