"""What `estimate-memory` estimates: the memory of one rank of a training step, before any weights are made."""

from dataclasses import replace

import torch

from sambasim.commands.question import OnPhase
from sambasim.compiler.capture.tensors import default_type
from sambasim.compiler.front import captured_from_options
from sambasim.compiler.passes import Fits, Place, Recompute, pipeline
from sambasim.errors import CaptureError, ModelError
from sambasim.ir.graph import Graph
from sambasim.ir.program import AVERAGE
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
    changed = {"dtype": "fp32", "master_weights": False, "stochastic_rounding": False, "recompute": "none"}
    options = options.model_copy(update=changed)
    dtype = "bfloat16"
    try:
        with default_type(torch.bfloat16):
            program, model = captured_from_options(options, on_phase, dtype=torch.bfloat16, quick=True)
    except (CaptureError, ModelError):
        dtype = "float32"
        try:
            program, model = captured_from_options(options, on_phase, quick=True)
        except CaptureError:  # a capture as by `compile` names lines
            program, model = captured_from_options(options, on_phase)
    program = replace(program, evaluation=Graph("evaluation", (), (), (), {}), single=None)
    on_phase("recompute activations")
    first, *others = pipeline(options, model=model)
    cut = first(program)
    recomputed = {"sections": Recompute("sections")(cut).step, "full": Recompute("full")(program).step}
    graphs = {"none": program.step, **recomputed}
    for change in others:
        cut = cut if isinstance(change, Place | Fits) else change(cut)
    return Choices(cut, graphs, dtype, replicas=replicas, passes=options.training.accumulation_steps)
