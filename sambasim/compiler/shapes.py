"""Compile a model for what it would cost alone: on fake tensors, which have shapes and no memory."""

from collections.abc import Callable, Mapping

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from sambasim.compiler.compile import Stopwatch, capture_model, pipeline
from sambasim.compiler.passes import run_pipeline
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions


class _FakeMode(FakeTensorMode):
    """One for a model and all copies that it makes of its parts: copy.deepcopy would make another for each tensor."""

    def __deepcopy__(self, memo: dict[int, object]) -> "_FakeMode":
        return self


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
    mode = _FakeMode(allow_non_fake_inputs=True)
    with mode:
        model = make()
    inputs, by_keyword = example(model)
    shapes = {name: mode.from_tensor(tensor) for name, tensor in inputs.items()}
    if batch_size is not None:
        shapes = {name: shape.new_empty((batch_size, *shape.shape[1:])) for name, shape in shapes.items()}
    built = capture_model(model, shapes, options, by_keyword=by_keyword, any_loss=any_loss, watch=watch)
    program = run_pipeline(built.program, pipeline(options), watch.begin)
    watch.end()
    return program
