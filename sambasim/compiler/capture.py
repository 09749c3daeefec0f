"""Captures a module as a functional FX graph, as Python runs it; the one file that uses torch's export machinery, of
which AOTAutograd's joint trace is private and tested with `TESTED_TORCH`."""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd import descriptors as aot
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.utils._pytree import tree_leaves

from sambasim.compiler.as_eager import drop_as_eager, kernels_of_eager, known_shapes, plain_operators, strided_in_order
from sambasim.compiler.asked_values import Asked, Followed, modes_reach_inside
from sambasim.compiler.captured import CapturedGraph, Role, complex_constants, restore_strides
from sambasim.compiler.explain import SHAPE, tracer_error
from sambasim.compiler.line_marks import modules_marked
from sambasim.compiler.lost import nothing_lost
from sambasim.compiler.names import source_line
from sambasim.compiler.precision import Widened
from sambasim.compiler.trial import as_written, replaced, tied_once, tracing, trial
from sambasim.errors import CaptureError

TESTED_TORCH = ("2.13.0",)

fx.node.has_side_effect(torch.ops.aten._assert_async.default)  # torch itself says so of the one with a message


def capture(
    step: nn.Module, inputs: Sequence[Tensor], asked: Asked | None = None, *, narrow: bool = False
) -> CapturedGraph:
    """The graph of `step` as Python runs it: forward, loss and backward; in evaluation mode the forward alone. `asked`:
    what an eager call asked of values, which the graph takes for granted and checks in each step. `narrow`: with
    float32 where the type of the numbers would not do, see `precision`. Raises CaptureError, with the
    user's line, for what cannot be traced."""
    asked = asked or Asked()
    if asked.refused is not None:
        raise asked.refused
    with _tracing("training step" if step.training else "evaluation graph"), contextlib.ExitStack() as stack:
        for context in (_compiled_parts(), answers_of_eager(), modes_reach_inside(), torch.enable_grad()):
            stack.enter_context(context)
        stack.enter_context(kernels_of_eager())
        attributes = stack.enter_context(trial(step))
        stack.enter_context(tied_once(step))
        stack.enter_context(modules_marked(step))
        stack.enter_context(nothing_lost(training=step.training))
        if narrow:
            stack.enter_context(_buffers_without_bases(step))
            stack.enter_context(Widened())
        followed = stack.enter_context(contextlib.closing(Followed(asked, step, attributes)))
        with followed:
            joint = aot_export_joint_with_descriptors(stack, step, tuple(tensor.clone() for tensor in inputs))
    captured = _described(joint.graph_module, asked.names)
    if step.training:
        return captured
    outputs = tuple((value, role) for value, role in captured.outputs if role.kind == "output")
    buffers = tuple(role.name.removeprefix("model.") for _, role in captured.outputs if role.kind == "buffer")
    return replace(captured, outputs=outputs, kept_buffers=buffers)


def _check_static(graph: fx.Graph) -> None:
    """Raises CaptureError for sizes that torch's tracers leave open."""
    for node in graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            sizes = value.shape if isinstance(value, Tensor) else (value,)
            if any(isinstance(size, (torch.SymInt, torch.SymBool, torch.SymFloat)) for size in sizes):
                line = source_line(node)
                raise CaptureError(SHAPE.what, where=str(line) if line else None, remedy=SHAPE.rewrite)


def _checked(constants: dict[str, Tensor]) -> dict[str, Tensor]:
    """`constants`. Raises CaptureError for values of this call, which a trace of torch.vmap takes for constants."""
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, constants.values())):
        what = "torch.vmap over tensors that the model has made cannot be captured"
        raise CaptureError(what, remedy="write the operation on the whole batch, such as a product by torch.bmm")
    return constants


def _described(module: fx.GraphModule, names: Mapping[int, str]) -> CapturedGraph:
    graph = module.graph
    _check_static(graph)
    drop_as_eager(graph)
    plain_operators(graph)
    strided_in_order(graph)
    roles = {node.name: _role(node.meta["desc"]) for node in graph.nodes if node.op == "placeholder"}
    output = next(iter(reversed(graph.nodes)))
    described = zip(output.args[0], output.meta["desc"], strict=True)
    outputs = tuple((value, _role(description)) for value, description in described if value is not None)
    constants: dict[str, Tensor] = {}
    for node in graph.nodes:
        value = attrgetter(node.target)(module) if node.op == "get_attr" else None
        if isinstance(value, Tensor):
            node.target = names.get(id(value), node.target)
            constants[node.target] = value
    return complex_constants(restore_strides(CapturedGraph(graph, roles, outputs, _checked(constants))))


@contextlib.contextmanager
def _buffers_without_bases(step: nn.Module) -> Iterator[None]:
    """A view that was rounded is of another type than its base, which torch's export does not expect."""
    places = [(module._buffers, name, one) for module in step.modules() for name, one in module._buffers.items()]
    views = [(held, name, one) for held, name, one in places if one is not None and one._is_view()]
    try:
        for held, name, view in views:
            held[name] = view.clone()
        yield
    finally:
        for held, name, view in views:
            held[name] = view


def _role(description: object) -> Role:
    match description:
        case aot.ParamAOTInput(target=path):
            return Role("parameter", path)
        case (
            aot.BufferAOTInput(target=path) | aot.InputMutationAOTOutput(mutated_input=aot.BufferAOTInput(target=path))
        ):
            return Role("buffer", path)
        case aot.PlainAOTInput(idx=index):
            return Role("input", str(index))
        case aot.TangentAOTInput(output=aot.PlainAOTOutput(idx=index)):
            return Role("tangent", str(index))
        case aot.PlainAOTOutput(idx=index):
            return Role("output", str(index))
        case aot.GradAOTOutput(grad_of=aot.ParamAOTInput(target=path)):
            return Role("gradient", path)
        case aot.GradAOTOutput(grad_of=aot.PlainAOTInput(idx=index)):
            return Role("input_gradient", str(index))
    raise CaptureError(
        f"the traced step reads or returns something that sambasim does not know: {description}",
        remedy="a model may change its buffers, but neither its inputs nor its parameters, in forward()",
    )


@contextlib.contextmanager
def _compiled_parts() -> Iterator[None]:
    """As `as_written`, which makes it safe to trace what torch.compile has compiled."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(as_written())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch._dynamo.config.patch(error_on_nested_fx_trace=False))
        yield


@contextlib.contextmanager
def answers_of_eager() -> Iterator[None]:
    """Within this context a model that asks whether it is compiled or exported hears that it is not."""
    with contextlib.ExitStack() as stack:
        for name in ("is_exporting", "is_compiling", "is_dynamo_compiling"):
            stack.enter_context(replaced(torch.compiler, name, lambda: False))
        yield


@contextlib.contextmanager
def _tracing(what: str) -> Iterator[None]:
    """What torch raises becomes a CaptureError, and what it prints beside that is dropped."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch logs what it raises, at length; the error below says it once
    said = io.StringIO()  # and prints the graph that it had so far
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(said), known_shapes(), tracing():
            warnings.simplefilter("ignore")  # about side effects of library code, which tracing keeps harmless
            yield
    except (Exception, SystemExit) as error:
        if (found := tracer_error(what, error)) is None:
            raise
        raise found from error
    finally:
        logging.disable(disabled)
    sys.stderr.write(said.getvalue())  # the user's own prints
