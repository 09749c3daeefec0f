"""Memory of all ranks while GPT-2 small trains at four replicas with AdamW, against DistributedDataParallel."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from sambasim.compiler.compile import compile_model
from sambasim.options.compile import CompileOptions
from sambasim.options.training import DataOptions, ModelOptions, OptimizerOptions, TrainingOptions
from tests.benchmarks.compilation import BATCH, LENGTH, Gpt2Small
from tests.benchmarks.measure import Figure
from tests.support.mpi import mpirun

REPLICAS = 4
_TIMEOUT_S = 900


def figures() -> Iterator[Figure]:
    """One figure: the sums of proportional set sizes."""
    with tempfile.TemporaryDirectory() as folder:
        pef = _compile(Path(folder))
        held = {which: _held_bytes(which, pef) for which in ("sambasim", "ddp")}
    yield Figure("memory, GPT-2 small, np 4", "sambasim", "ddp", "ratio at most 0.55", held, unit="bytes")


def _compile(folder: Path) -> Path:
    torch.manual_seed(0)
    tokens = torch.randint(0, 50257, (BATCH, LENGTH))
    options = CompileOptions(
        model=ModelOptions(target="tests.benchmarks.compilation:Gpt2Small"),
        data=DataOptions(source="synthetic"),
        optimizer=OptimizerOptions(name="adamw", lr=1e-4),
        training=TrainingOptions(batch_size=BATCH),
        output_folder=folder,
        data_parallel=True,
    )
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    return compile_model(Gpt2Small(), inputs, options, by_keyword=False).path


def _held_bytes(which: str, pef: Path) -> float:
    body = [sys.executable, "-m", "tests.benchmarks.bodies.memory", which, str(pef)]
    command = [mpirun(), "-np", str(REPLICAS), *body]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if result.returncode:
        raise RuntimeError(result.stderr)
    return float(json.loads(result.stdout.splitlines()[-1])["held_bytes"])
