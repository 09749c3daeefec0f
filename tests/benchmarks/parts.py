"""The parts of a step: forward and backward against eager PyTorch, and gradient sync against gloo, MPI and copying.

The candidates of forward and backward take turns, each round in a process of its own: the runtime makes the C library
keep freed memory, and eager PyTorch in the same process would gain from that too.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from sambasim.compiler.compile import compile_model
from sambasim.options.compile import CompileOptions
from sambasim.options.training import LossOptions, ModelOptions, OptimizerOptions, TrainingOptions
from sambasim.records.collectives import CollectivesRecord, SizeRecord
from sambasim.units import KIB, MIB, format_bytes
from tests.benchmarks.measure import Figure, run_body
from tests.benchmarks.workloads import SUBJECTS, Subject
from tests.support.mpi import ROOT, mpirun

ROUNDS, RUNS = 9, 6
_PEER = "eager PyTorch"

_TIMEOUT_S = 900.0
_COPY = "copying as many bytes"

_SIZES_BYTES = (MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_GOALS = (
    (64 * KIB, "mpi", "ratio at most 1"),
    (64 * KIB, "mpi-in-place", "none: what an MPI saves by one buffer"),
    *((size_bytes, "gloo", "ratio at most 0.1") for size_bytes in _SIZES_BYTES),
    *((size_bytes, "mpi", "ratio at most 0.2") for size_bytes in _SIZES_BYTES),
    *((size_bytes, "mpi-in-place", "none: what an MPI saves by one buffer") for size_bytes in _SIZES_BYTES),
    *((size_bytes, _COPY, "ratio at most 1.1") for size_bytes in (16 * MIB, 64 * MIB)),
)
"""Size, peer of device sync, and goal."""


def arithmetic_figures() -> Iterator[Figure]:
    """A GPT of 10.7 million parameters by both engines, and a logistic regression at batch 1, many times over."""
    with tempfile.TemporaryDirectory() as folder:
        gpt, regression = SUBJECTS["gpt"], SUBJECTS["logistic_regression"]
        goals = {"plain engine": "ratio at most 1.01", "inductor": "ratio at most 0.92"}
        yield from _passes(Path(folder), gpt, "forward and backward of a GPT", goals)
        title = f"{regression.passes} times forward and backward of a logistic regression at batch 1"
        yield from _passes(Path(folder), regression, title, {"plain engine": "ratio below 0.3"})


def _passes(folder: Path, subject: Subject, title: str, goals: dict[str, str]) -> Iterator[Figure]:
    _compile(subject, folder / subject.name)
    seconds: dict[str, list[float]] = {way: [] for way in (*goals, _PEER)}
    for _ in range(ROUNDS):
        for way, values in seconds.items():
            values += run_body("passes", str(folder), subject.name, way, str(RUNS))
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


def sync_figures() -> Iterator[Figure]:
    """One run of `sambasim bench collectives` at np 2, and from it a figure for each goal."""
    sizes = {size.size_bytes: size for size in _collectives().sizes}
    for size_bytes, peer, goal in _GOALS:
        times_s = _times_s(sizes[size_bytes])
        medians = {"device": times_s["device"], peer: times_s[peer]}
        yield Figure(f"sync of {format_bytes(size_bytes)}", "device", peer, goal, medians)


def _collectives() -> CollectivesRecord:
    choices = ["--min-bytes", "64KiB", "--max-bytes", "64MiB", "--paths", "device,mpi,mpi-in-place,gloo", "--json"]
    command = [mpirun(), "-np", "2", sys.executable, "-m", "sambasim", "bench", "collectives", *choices]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=True)
    return CollectivesRecord.model_validate_json(result.stdout)


def _times_s(size: SizeRecord) -> Mapping[str, float]:
    """By name, the medians of the paths and of the copy."""
    return {path.path: path.measured_s for path in size.paths} | {_COPY: size.copy_bound_s}
