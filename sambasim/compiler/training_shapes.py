"""The training step alone, captured quickly on tensors without memory: for what needs shapes and no times, such as an
estimate of memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from sambasim.compiler.build import Captures, build
from sambasim.compiler.capture import capture
from sambasim.compiler.captured import starts_a_backward
from sambasim.compiler.compile import Stopwatch, capture_model
from sambasim.compiler.front import Example, build_model, example_of_one, model_of_shapes
from sambasim.compiler.passes import Fits, Place
from sambasim.compiler.precision import default_type, inputs_in
from sambasim.compiler.recompute import Recompute
from sambasim.compiler.step import TrainingStep, training_loss
from sambasim.compiler.strategy import pipeline
from sambasim.compiler.tensors import check_model, dense_gradients, made_contiguous
from sambasim.compiler.trial import buffers_of_plain_tensors, rare_collections
from sambasim.errors import CaptureError, InternalError, ModelError
from sambasim.ir.graph import Graph
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions


@dataclass(frozen=True, slots=True)
class TrainingShapes:
    """A program with optimizer and data parallelism, without evaluation and addresses, and the graph of its forward and
    backward by recomputation: `none`, `sections`, `full`. `dtype`: the type that the model was captured in. A graph in
    bfloat16 shows what a model computes in float32 all the same; one in float32 does not."""

    program: Program
    graphs: Mapping[str, Graph]
    dtype: Literal["bfloat16", "float32"]


def training_shapes(options: CompileOptions, on_phase: Callable[[str], None] = lambda phase: None) -> TrainingShapes:
    """The training step of what `options` name, whatever their dtype and recomputation are: in bfloat16 if the model
    can be made and captured in it, else in float32. Raises ModelError, DataError and CaptureError."""
    with rare_collections():
        return _training_shapes(options, Stopwatch(on_phase))


def _training_shapes(options: CompileOptions, watch: Stopwatch) -> TrainingShapes:
    changed = {"dtype": "fp32", "master_weights": False, "stochastic_rounding": False, "recompute": "none"}
    options = options.model_copy(update=changed)
    try:
        with default_type(torch.bfloat16):
            model, example = _model_and_example(options, watch)
            program = _captured(model, example._replace(inputs=inputs_in(torch.bfloat16, example.inputs)), options)
        dtype: Literal["bfloat16", "float32"] = "bfloat16"
    except (CaptureError, ModelError):
        model, example = _model_and_example(options, watch)
        program, dtype = _captured_if_possible(model, example, options, watch), "float32"
    watch.begin("recompute activations")
    first, *rest = pipeline(options, model=model)
    cut = first(program)
    graphs = {
        "none": _training(program),
        "sections": _training(Recompute("sections")(cut)),
        "full": _training(Recompute("full")(program)),
    }
    for one in rest:
        if not isinstance(one, Place | Fits):
            cut = one(cut)
    return TrainingShapes(cut, graphs, dtype)


def _model_and_example(options: CompileOptions, watch: Stopwatch) -> tuple[nn.Module, Example]:
    watch.begin("build the model")
    found = model_of_shapes(
        lambda: build_model(options), lambda model: example_of_one(model, options), options.training.batch_size
    )
    watch.begin("capture the training step")
    return found


def _captured_if_possible(model: nn.Module, example: Example, options: CompileOptions, watch: Stopwatch) -> Program:
    """What cannot be captured quickly is captured as `compile` does it, whose errors name the line."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        return _captured(model, example, options)
    except CaptureError:
        for module, was_training in modes:
            module.training = was_training
        shapes, by_keyword, arguments = example
        built = capture_model(model, shapes, options, by_keyword=by_keyword, arguments=arguments, watch=watch)
        return _without_evaluation(built.program)


def _captured(model: nn.Module, example: Example, options: CompileOptions) -> Program:
    """The forward and the backward of `model`."""
    shapes, by_keyword, arguments = example
    loss = training_loss(options.loss.name, options.loss.args) if options.loss else None
    step = TrainingStep(model, tuple(shapes), loss, by_keyword, arguments=arguments).train()
    with buffers_of_plain_tensors(model), made_contiguous(model), dense_gradients(model):
        check_model(model, training=True, replicas=True)
        captured = capture(step, tuple(shapes.values()))
        if not starts_a_backward(captured, any_shape=False):
            raise CaptureError("the training step returns no loss")
        captures = Captures(captured, replace(captured, outputs=()), None, per_sample_loss=False)
        return _without_evaluation(build(options.name, model, shapes, captures, options.training.batch_size).program)


def _without_evaluation(program: Program) -> Program:
    return replace(program, evaluation=Graph("evaluation", (), (), (), {}), single=None)


def _training(program: Program) -> Graph:
    if program.training is None:
        raise InternalError("a capture of a training step without one")
    return program.training
