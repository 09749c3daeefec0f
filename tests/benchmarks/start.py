"""How long a user waits: for help, the error of a wrong flag, the first step of a run, an app, and a compile."""

import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from sambasim.compiler.compile import compile_model
from sambasim.options.compile import CompileOptions
from sambasim.options.training import ModelOptions, OptimizerOptions, TrainingOptions
from tests.benchmarks.measure import Figure, compare
from tests.benchmarks.workloads import GPT2_BATCH, GPT2_LENGTH, Gpt2Small
from tests.support.mpi import ROOT, mpirun

_TIMEOUT_S = 300.0
_PLAIN_SCRIPT = """
import torch
from torch import nn

model = nn.Linear(784, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
image, label = torch.randn(32, 784), torch.randint(10, (32,))
optimizer.zero_grad()
torch.autograd.backward(nn.functional.cross_entropy(model(image), label))
optimizer.step()
"""
_SAMBASIM = [sys.executable, "-m", "sambasim"]
_IMPORT_TORCH = [sys.executable, "-c", "import torch"]
_PLAIN_STEP = [sys.executable, "-c", _PLAIN_SCRIPT]
_APP = ROOT / "examples" / "sambaflow" / "logistic_regression.py"
_IMPORT_BOTH = [sys.executable, "-c", "import torch; from mpi4py import MPI"]


def _execute(command: Sequence[str]) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environ, capture_output=True, timeout=_TIMEOUT_S, check=False)


def _seconds_to_first_step(pef: Path) -> float:
    """From the start of the process to the line that tells of the first step."""
    command = [mpirun(), "-np", "2", *_SAMBASIM, "run", "--reduce-on-rdu", "--no-evaluate", "--steps", "2"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    began_s = time.perf_counter()
    with subprocess.Popen([*command, "--pef", str(pef)], env=environ, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if line.startswith("step 1/"):
                elapsed_s = time.perf_counter() - began_s
        process.wait(timeout=_TIMEOUT_S)
    return elapsed_s


def start_figures() -> Iterator[Figure]:
    """Help and refusal against importing torch; the first step against importing torch and MPI on two ranks; an app
    that loads its PEF and compares one step with PyTorch's, against a plain script that takes one step."""
    importing = ("import torch", lambda: _execute(_IMPORT_TORCH))
    for name, arguments in (("help", ["--help"]), ("a wrong flag", ["run", "--pfe", "x"])):
        action = (f"sambasim {' '.join(arguments)}", lambda arguments=arguments: _execute([*_SAMBASIM, *arguments]))
        yield compare(name, action, importing, "ratio below 0.2", runs=7)
    with tempfile.TemporaryDirectory() as folder:
        _execute([*_SAMBASIM, "compile", "--data-parallel", "-ws", "2", "--output-folder", folder])
        pef = Path(folder) / "digits" / "digits.pef"
        yield compare(
            "first step at np 2",
            ("sambasim run", lambda: _seconds_to_first_step(pef)),
            ("import torch and MPI", lambda: _execute([mpirun(), "-np", "2", *_IMPORT_BOTH])),
            "difference at most 2 s",
            runs=5,
        )
        app = [*_SAMBASIM, "app", str(_APP)]
        _execute([*app, "compile", "-b", "32", "--pef-name", "app", "--output-folder", folder])
        pef = Path(folder) / "app" / "app.pef"
        yield compare(
            "an app's first step",
            ("sambasim app … test", lambda: _execute([*app, "test", "-b", "32", "--pef", str(pef)])),
            ("a plain PyTorch step", lambda: _execute(_PLAIN_STEP)),
            "ratio at most 1",
            runs=5,
        )


def compilation_figures() -> Iterator[Figure]:
    """Compile GPT-2 small and write the PEF, against `torch.export.export(strict=True)` of the same module."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Gpt2Small()
    tokens = torch.randint(0, 50257, (GPT2_BATCH, GPT2_LENGTH))
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    with tempfile.TemporaryDirectory() as folder:
        options = CompileOptions(
            model=ModelOptions(target="tests.benchmarks.workloads:Gpt2Small"),
            optimizer=OptimizerOptions(name="adamw"),
            training=TrainingOptions(batch_size=GPT2_BATCH),
            output_folder=Path(folder),
            data_parallel=True,
        )

        def ours() -> float:
            began_s = time.perf_counter()
            compiled = compile_model(model, inputs, options, by_keyword=False)
            elapsed_s = time.perf_counter() - began_s
            print("  " + ", ".join(f"{phase} {time_s:.2f} s" for phase, time_s in compiled.phases_s.items()))
            return elapsed_s

        def theirs() -> None:
            torch.export.export(model, tuple(inputs.values()), strict=True)

        yield compare(
            "compile GPT-2 small",
            ("sambasim, PEF written", ours),
            ("torch.export strict", theirs),
            "ratio below 2.5",
            runs=5,
        )
