"""Compile a model for what it would cost alone: on fake tensors, which have shapes and no memory."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sambasim.compiler.compile import Stopwatch, capture_model, pipeline
from sambasim.compiler.passes import run_pipeline
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions


def compile_shapes(
    make: Callable[[], tuple[nn.Module, Mapping[str, Tensor]]],
    options: CompileOptions,
    hear: Callable[[str], None] = lambda phase: None,
) -> Program:
    """The program of what `make` gives: a model, and a batch of its inputs by name. `hear` is told each phase.

    A model of any size may be made: `make` is called where every new tensor is fake. Raises ModelError and CaptureError
    for what the model does wrong.
    """
    watch = Stopwatch(hear)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, inputs = make()
    built = capture_model(model, dict(inputs), options, by_keyword=True, any_loss=True, watch=watch)
    program = run_pipeline(built.program, pipeline(options), watch.begin)
    watch.end()
    return program
