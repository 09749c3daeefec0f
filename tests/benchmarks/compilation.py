"""Compiling GPT-2 small, the PEF's writing included, against torch's own strict export of the same module."""

import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from sambasim.compiler.compile import compile_model
from sambasim.options.compile import CompileOptions
from sambasim.options.training import ModelOptions, OptimizerOptions, TrainingOptions
from tests.benchmarks.measure import Figure, compare

BATCH, LENGTH = 2, 128


class Gpt2Small(nn.Module):
    """GPT-2 small, 124 million parameters, as a SambaFlow model: `(input_ids, labels) -> (loss, logits)`."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT2LMHeadModel(GPT2Config(use_cache=False))

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        result = self.gpt(input_ids=input_ids, labels=labels)
        return result.loss, result.logits


def figures() -> Iterator[Figure]:
    """One figure: all of `compile_model` against `torch.export.export(strict=True)`."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Gpt2Small()
    tokens = torch.randint(0, 50257, (BATCH, LENGTH))
    inputs = {"input_ids": tokens, "labels": tokens.clone()}
    with tempfile.TemporaryDirectory() as folder:
        options = CompileOptions(
            model=ModelOptions(target="tests.benchmarks.compilation:Gpt2Small"),
            optimizer=OptimizerOptions(name="adamw"),
            training=TrainingOptions(batch_size=BATCH),
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
