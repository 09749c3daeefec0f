"""Compiling on fake tensors: the same program as on real ones, of any size."""

import torch

from sambasim.compiler.compile import Stopwatch, capture_model, pipeline
from sambasim.compiler.front import compile_shapes
from sambasim.compiler.passes import run_pipeline
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions
from sambasim.options.training import OptimizerOptions
from sambasim.published.models import MODELS

OPTIONS = CompileOptions(optimizer=OptimizerOptions(name="adamw"), pef_name="gpt")
GPT = {"heads": 2, "layers": 2, "length": 16, "vocabulary": 100}


def _fake(width: int) -> Program:
    make, batch = MODELS["gpt2"]
    return compile_shapes(
        lambda: make(width=width, **GPT), lambda _: (batch(4, width=width, **GPT), True), OPTIONS, any_loss=True
    )


def test_the_program_is_that_of_real_tensors() -> None:
    make, batch = MODELS["gpt2"]
    model, inputs = make(width=32, **GPT), batch(4, **GPT)
    built = capture_model(model, inputs, OPTIONS, by_keyword=True, any_loss=True, watch=Stopwatch(lambda phase: None))
    real = run_pipeline(built.program, pipeline(OPTIONS), lambda title: None)
    fake = _fake(32)
    assert fake.training == real.training
    assert fake.groups == real.groups
    assert fake.device_bytes == real.device_bytes


def test_a_model_that_no_machine_holds_takes_no_memory() -> None:
    before = torch.get_default_dtype()
    assert _fake(2**15).device_bytes > 3 * 10**11
    assert torch.get_default_dtype() is before
