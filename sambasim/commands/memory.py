"""What `estimate-memory` estimates: the memory of one rank of a training step, before any weights are made."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from sambasim.commands.question import OnPhase
from sambasim.compiler.capture.tensors import default_type, inputs_in
from sambasim.compiler.compile import Stopwatch, capture_model
from sambasim.compiler.front import build_model, example_of_one, model_of_shapes
from sambasim.compiler.passes import Fits, Place, Recompute, pipeline
from sambasim.errors import CaptureError, ModelError
from sambasim.ir.graph import Graph
from sambasim.ir.program import AVERAGE, Program
from sambasim.options.compile import CompileOptions
from sambasim.options.training import OptimizerOptions
from sambasim.simulation.memory import DTYPES, Choice, Choices


def memory_choices(options: CompileOptions, replicas: int, on_phase: OnPhase) -> tuple[Choices, Choice]:
    """All choices, and the one that `options` make."""
    choices = training_shapes(options, on_phase, replicas)
    asked = options.dtype, options.keeps_master_weights
    dtype = next(dtype for dtype in DTYPES if (dtype.name, dtype.master) == asked)
    optimizer = options.optimizer or OptimizerOptions(name="adamw")
    states = tuple(state for state in choices.program.optimizers[0].states if state != AVERAGE)
    return choices, Choice(dtype, options.recompute, optimizer.name, states, options.zero)


def training_shapes(options: CompileOptions, on_phase: OnPhase = lambda phase: None, replicas: int = 1) -> Choices:
    """The training step of what `options` name, without evaluation and addresses, whatever their dtype and
    recomputation are: in bfloat16 if the model can be made and captured in it, as only such a graph shows what it
    computes in float32 all the same, else in float32. Raises ModelError, DataError and CaptureError."""
    watch = Stopwatch(on_phase)
    changed = {"dtype": "fp32", "master_weights": False, "stochastic_rounding": False, "recompute": "none"}
    options = options.model_copy(update=changed)
    dtype = "bfloat16"
    try:
        with default_type(torch.bfloat16):
            model, program = _captured(options, watch, torch.bfloat16)
    except (CaptureError, ModelError):
        dtype = "float32"
        model, program = _captured(options, watch)
    watch.begin("recompute activations")
    first, *others = pipeline(options, model=model)
    cut = first(program)
    recomputed = {"sections": Recompute("sections")(cut).step, "full": Recompute("full")(program).step}
    graphs = {"none": program.step, **recomputed}
    for change in others:
        cut = cut if isinstance(change, Place | Fits) else change(cut)
    return Choices(cut, graphs, dtype, replicas=replicas, passes=options.training.accumulation_steps)


def _captured(options: CompileOptions, watch: Stopwatch, dtype: torch.dtype | None = None) -> tuple[nn.Module, Program]:
    """The model and its step with inputs in `dtype`; without, captured as by `compile` if need be, to name lines."""
    watch.begin("build the model")
    size, make = options.training.batch_size, partial(build_model, options)
    model, example = model_of_shapes(make, lambda model: example_of_one(model, options), size)
    watch.begin("capture the training step")
    example = example._replace(inputs=inputs_in(dtype, example.inputs))
    try:
        program = capture_model(model, example, options, watch, quick=True).program
    except CaptureError:
        if dtype is not None:
            raise
        program = capture_model(model, example, options, watch).program
    return model, replace(program, evaluation=Graph("evaluation", (), (), (), {}), single=None)
