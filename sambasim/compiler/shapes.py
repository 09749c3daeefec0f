"""Compile a model for what it would cost alone: on fake tensors, which have shapes and no memory."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sambasim.compiler.compile import Stopwatch, capture_model, pipeline
from sambasim.compiler.passes import run_pipeline
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions

Example = tuple[Mapping[str, Tensor], bool]
"""A batch of inputs by name, and whether the model takes its inputs by name."""


def compile_shapes(
    make: Callable[[], nn.Module],
    example: Callable[[nn.Module], Example],
    options: CompileOptions,
    hear: Callable[[str], None] = lambda phase: None,
    *,
    any_loss: bool = False,
) -> Program:
    """The program of the model that `make` gives, for the batch that `example` gives for it. `hear` is told each phase.

    A model of any size may be made: `make` is called where every new tensor is fake. Tensors of `example` may be real.
    Raises ModelError and CaptureError for what the model does wrong, MachineError for one that does not fit.
    """
    watch = Stopwatch(hear)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model = make()
    inputs, by_keyword = example(model)
    shapes = {name: mode.from_tensor(tensor) for name, tensor in inputs.items()}
    built = capture_model(model, shapes, options, by_keyword=by_keyword, any_loss=any_loss, watch=watch)
    program = run_pipeline(built.program, pipeline(options), watch.begin)
    watch.end()
    return program
