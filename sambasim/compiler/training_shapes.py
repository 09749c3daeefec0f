"""The training step alone, captured quickly on tensors without memory: for what needs shapes and no times, such as an
estimate of memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from sambasim.compiler.build import Captures, build
from sambasim.compiler.capture import answers_of_eager, capture_shapes
from sambasim.compiler.captured import starts_a_backward
from sambasim.compiler.compile import Stopwatch, capture_model
from sambasim.compiler.front import Example, build_model, example_of_one, model_of_shapes
from sambasim.compiler.passes import Fits, run_pipeline
from sambasim.compiler.recompute import Recompute
from sambasim.compiler.step import TrainingStep, training_loss
from sambasim.compiler.strategy import pipeline
from sambasim.compiler.tensors import check_model, dense_gradients, made_contiguous
from sambasim.compiler.trial import buffers_of_plain_tensors, rare_collections, variables_are_tensors
from sambasim.errors import CaptureError, InternalError
from sambasim.ir.graph import Graph
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions

@dataclass(frozen=True, slots=True)
class TrainingShapes:
    """A program with optimizer and data parallelism, whose evaluation graph is empty, and the graph of its forward and
    backward by recomputation: `none`, `sections`, `full`."""

    program: Program
    graphs: Mapping[str, Graph]


def training_shapes(options: CompileOptions, on_phase: Callable[[str], None] = lambda phase: None) -> TrainingShapes:
    """The training step of what `options` name, in the types that the model has, whatever `options.dtype` is. Raises
    ModelError, DataError and CaptureError."""
    watch = Stopwatch(on_phase)
    watch.begin("build the model")
    model, example = model_of_shapes(
        lambda: build_model(options), lambda model: example_of_one(model, options), options.training.batch_size
    )
    changed = {"dtype": "fp32", "master_weights": False, "stochastic_rounding": False, "recompute": "none"}
    options = options.model_copy(update=changed)
    program = _captured(model, example, options, watch)
    watch.begin("recompute activations")
    first, *rest = pipeline(options, model=model)
    cut = first(program)
    of_sections, of_segments = Recompute("sections")(cut), Recompute("full")(program)
    graphs = {"none": _training(program), "sections": _training(of_sections), "full": _training(of_segments)}
    return TrainingShapes(run_pipeline(cut, [one for one in rest if not isinstance(one, Fits)], watch.begin), graphs)


def _captured(model: nn.Module, example: Example, options: CompileOptions, watch: Stopwatch) -> Program:
    """The forward and the backward of `model`. What cannot be captured quickly is captured as `compile` does it, whose
    errors name the line."""
    watch.begin("capture the training step")
    shapes, by_keyword, arguments = example
    modes = [(module, module.training) for module in model.modules()]
    loss = training_loss(options.loss.name, options.loss.args) if options.loss else None
    step = TrainingStep(model, tuple(shapes), loss, by_keyword, arguments=arguments).train()
    try:
        with buffers_of_plain_tensors(model), rare_collections(), made_contiguous(model), dense_gradients(model):
            check_model(model, training=True, replicas=True)
            with variables_are_tensors(), answers_of_eager(compiled=False):
                captured = capture_shapes(step, tuple(shapes.values()))
            if not starts_a_backward(captured, any_shape=False):
                raise CaptureError("the training step returns no loss")
            nothing = replace(captured, outputs=())
            captures = Captures(captured, nothing, None, per_sample_loss=False)
            program = build(options.name, model, shapes, captures, options.training.batch_size).program
    except CaptureError:
        for module, was_training in modes:
            module.training = was_training
        built = capture_model(model, shapes, options, by_keyword=by_keyword, arguments=arguments, watch=watch)
        program = built.program
    return replace(program, evaluation=Graph("evaluation", (), (), (), {}), single=None)


def _training(program: Program) -> Graph:
    if program.training is None:
        raise InternalError("a capture of a training step without one")
    return program.training
