"""Compile a model for what it would cost alone: on fake tensors, which have shapes and no memory."""

import warnings
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
    batch_size: int | None = None,
) -> Program:
    """The program of the model that `make` gives, for the batch that `example` gives for it. `hear` is told each phase.

    batch_size: another one than that of the example

    A model of any size may be made: `make` is called where every new tensor is fake. Tensors of `example` may be real.
    Raises ModelError and CaptureError for what the model does wrong, MachineError for one that does not fit.
    """
    watch = Stopwatch(hear)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # A model may copy layers: copy.deepcopy asks for this, and would make each copy another mode.
    mode.__dict__["__deepcopy__"] = lambda memo: mode
    with mode, warnings.catch_warnings():
        # Torch looks where a copied tensor lies in memory, and warns itself that a fake one is nowhere.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        model = make()
    inputs, by_keyword = example(model)
    shapes: dict[str, Tensor] = {name: mode.from_tensor(tensor) for name, tensor in inputs.items()}
    if batch_size is not None:
        shapes = {name: shape.new_empty((batch_size, *shape.shape[1:])) for name, shape in shapes.items()}
    built = capture_model(model, shapes, options, by_keyword=by_keyword, any_loss=any_loss, watch=watch)
    program = run_pipeline(built.program, pipeline(options), watch.begin)
    watch.end()
    return program
