"""Captures a module as a functional FX graph, as Python runs it, with the constants that it reads; the one file that
uses torch's export machinery, of which AOTAutograd's joint trace is private and tested with `TESTED_TORCH`."""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter, ne
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd import descriptors as aot
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves

from sambasim.compiler.capture.as_eager import drop_as_eager, kernels_of_eager, plain_operators, strided_in_order
from sambasim.compiler.capture.asked_values import Asked, Followed, LinesMarked, modes_reach_inside
from sambasim.compiler.capture.explain import SHAPE, raised
from sambasim.compiler.capture.recording import source_line
from sambasim.compiler.capture.tensors import Widened, order_to_restore
from sambasim.compiler.capture.trial import nothing_lost, quiet, tied_once, tracing, trial, with_values
from sambasim.compiler.names import UniqueNames
from sambasim.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Role:
    """What an input or output of a captured graph is; `name`: the path of a tensor of the model, or else the index."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A functional FX graph: the roles of its placeholders by name, its outputs in order with theirs, and the constants
    that the trace itself made. `kept_buffers`: which the model changes in evaluation, and the graph does not."""

    graph: fx.Graph
    inputs: dict[str, Role]
    outputs: tuple[tuple[fx.Node, Role], ...]
    constants: dict[str, Tensor]
    kept_buffers: tuple[str, ...] = ()

    @property
    def cast_twice(self) -> tuple[str, ...]:
        """The parameters that several lines under torch.autocast read: PyTorch casts them once."""
        casts: Counter[str] = Counter()
        for node in self.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
            role = self.inputs.get(node.args[0].name)
            if role is not None and role.kind == "parameter" and node.meta.get("partitioner_tag") == "is_forward":
                casts[role.name] += 1
        return tuple(name.removeprefix("model.") for name, count in casts.items() if count > 1)

    @property
    def losses(self) -> tuple[int, ...]:
        """The indices of the outputs from which the backward starts; the first output's if there is no backward."""
        return tuple(sorted(int(role.name) for role in self.inputs.values() if role.kind == "tangent")) or (0,)


def plain_constants(graph: fx.Graph, constants: dict[str, Tensor], given_out: Set[fx.Node]) -> None:
    """Constants as a PEF can hold them: complex ones are made of two real ones, and the axes of those that are dense
    and not contiguous, as `torch.linalg.cholesky` makes them, are in the order of memory and permuted back. The graph
    and `constants` are changed."""
    for node in graph.find_nodes(op="get_attr"):
        key = str(node.target)
        if (value := constants.get(key)) is None:
            continue
        if value.is_complex():
            parts = {f"{key}_real": value.real.contiguous(), f"{key}_imaginary": value.imag.contiguous()}
            constants |= parts
            with graph.inserting_before(node):
                read = [graph.create_node("get_attr", part) for part in parts]
                whole = graph.call_function(torch.ops.aten.complex.default, tuple(read))
            for made, tensor in zip((*read, whole), (*parts.values(), node.meta["val"]), strict=True):
                made.meta = {**node.meta, "val": tensor}
            node.replace_all_uses_with(whole)
            graph.erase_node(node)
        elif (order := order_to_restore(value)) and node not in given_out:
            back = [order.index(axis) for axis in range(value.ndim)]
            with graph.inserting_after(node):
                restored = graph.call_function(torch.ops.aten.permute.default, (node, back))
            restored.meta = dict(node.meta)
            node.replace_all_uses_with(restored, delete_user_cb=partial(ne, restored))
            if isinstance(shape := node.meta.get("val"), Tensor):
                node.meta["val"] = shape.permute(order)


def held_in_order(graph: fx.Graph) -> None:
    """Parameters and buffers, which a device holds in the order of their axes, are read in the order that the user's
    have in memory, such as torch.channels_last: kernels choose by it, and round differently. `graph` is changed."""
    for node in graph.find_nodes(op="placeholder"):
        described, value = node.meta["desc"], node.meta.get("val")
        if not isinstance(described, aot.ParamAOTInput | aot.BufferAOTInput) or not node.users:
            continue
        if order := order_to_restore(value):
            back, first = [order.index(axis) for axis in range(value.ndim)], next(iter(node.users))
            with graph.inserting_before(first):
                there = graph.call_function(torch.ops.aten.permute.default, (node, list(order)))
                copied = graph.call_function(
                    torch.ops.aten.clone.default, (there,), {"memory_format": torch.contiguous_format}
                )
                restored = graph.call_function(torch.ops.aten.permute.default, (copied, back))
            in_place = value.permute(order)
            for made, tensor in ((there, in_place), (copied, in_place), (restored, value)):
                made.meta = {**first.meta, "val": tensor}
            node.meta["val"] = torch.empty_like(value, memory_format=torch.contiguous_format)
            there.meta["val"] = node.meta["val"].permute(order)
            node.replace_all_uses_with(restored, delete_user_cb=partial(ne, there))


fx.node.has_side_effect(torch.ops.aten._assert_async.default)  # torch itself says so of the one with a message


def capture(
    step: nn.Module, inputs: Sequence[Tensor], asked: Asked | None = None, *, narrow: bool = False
) -> CapturedGraph:
    """The graph of `step` as Python runs it: forward, loss and backward; in evaluation mode the forward alone. `asked`:
    what an eager call asked of values, which the graph takes for granted and checks in each step. `narrow`: with
    float32 where the type of the numbers would not do, see `tensors`. Raises CaptureError, with the user's line, for
    what cannot be traced."""
    asked = asked or Asked()
    if asked.refused is not None:
        raise asked.refused
    what = "training step" if step.training else "evaluation graph"
    with raised(what), tracing(), contextlib.ExitStack() as stack:
        enter = stack.enter_context
        if "torch._dynamo" in sys.modules:  # what torch.compile has compiled is traced as it was written
            enter(torch._dynamo.config.patch(error_on_nested_fx_trace=False))
        # A model that asks whether it is compiled or exported hears that it is not.
        asking = ("is_exporting", "is_compiling", "is_dynamo_compiling")
        enter(with_values([(torch.compiler, name, lambda: False) for name in asking]))
        for context in (modes_reach_inside(), torch.enable_grad(), kernels_of_eager()):
            enter(context)
        attributes = enter(trial(step))
        for context in (tied_once(step), _modules_marked(step), nothing_lost(training=step.training)):
            enter(context)
        if narrow:  # a view that was rounded is of another type than its base, which torch's export does not expect
            held = ((module, name, one) for module in step.modules() for name, one in module._buffers.items())
            views = [(module, name, one.clone()) for module, name, one in held if one is not None and one._is_view()]
            enter(with_values(views))
            enter(Widened())
        with enter(contextlib.closing(Followed(asked, step, attributes))):
            joint = aot_export_joint_with_descriptors(stack, step, tuple(tensor.clone() for tensor in inputs))
    frozen = {path for path, one in step.named_parameters(remove_duplicate=False) if not one.requires_grad}
    captured = _described(joint.graph_module, asked.names, frozen)
    if step.training:
        return captured
    outputs = tuple((value, role) for value, role in captured.outputs if role.kind == "output")
    buffers = tuple(role.name.removeprefix("model.") for _, role in captured.outputs if role.kind == "buffer")
    return replace(captured, outputs=outputs, kept_buffers=buffers)


def _described(module: fx.GraphModule, names: Mapping[int, str], frozen: Set[str]) -> CapturedGraph:
    graph = module.graph
    for node in graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            sizes = value.shape if isinstance(value, Tensor) else (value,)
            if any(isinstance(size, (torch.SymInt, torch.SymBool, torch.SymFloat)) for size in sizes):
                line = source_line(node)
                raise CaptureError(SHAPE.what, where=str(line) if line else None, remedy=SHAPE.rewrite)
    for change in (drop_as_eager, plain_operators, strided_in_order, held_in_order):
        change(graph)
    roles = {node.name: _role(node.meta["desc"]) for node in graph.nodes if node.op == "placeholder"}
    output = next(iter(reversed(graph.nodes)))
    described = zip(output.args[0], output.meta["desc"], strict=True)
    outputs = tuple((value, _role(description, frozen)) for value, description in described if value is not None)
    constants, unique, targets = dict[str, Tensor](), UniqueNames(), dict[int, str]()
    for node in graph.find_nodes(op="get_attr"):
        value = attrgetter(node.target)(module)
        if isinstance(value, Tensor):
            if id(value) not in targets:
                targets[id(value)] = unique.take(names.get(id(value), node.target))
            node.target = targets[id(value)]
            constants[node.target] = value
    # A trace of torch.vmap takes values of this call for constants.
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, constants.values())):
        what = "torch.vmap over tensors that the model has made cannot be captured"
        raise CaptureError(what, remedy="write the operation on the whole batch, such as a product by torch.bmm")
    plain_constants(graph, constants, {value for value, _ in outputs})
    return CapturedGraph(graph, roles, outputs, constants)


def _role(description: object, frozen: Set[str] = frozenset()) -> Role:
    match description:
        case aot.InputMutationAOTOutput(mutated_input=aot.ParamAOTInput(target=path)) if path in frozen:
            return Role("buffer", path)
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
    what = f"the traced step reads or returns something that sambasim does not know: {description}"
    remedy = "a model may change buffers and frozen parameters in forward(), but neither inputs nor what it trains"
    raise CaptureError(what, remedy=remedy)


def capture_update(update: Any, regions: Sequence[str], numbers: Sequence[str], shape: Sequence[int]) -> CapturedGraph:
    """The graph of `update`, which takes tensors of `shape` for `regions` by position, and changes them, and `numbers`
    by keyword. Its outputs have the names of the regions that it changes."""
    env = ShapeEnv()
    fake = FakeTensorMode(shape_env=env)

    def call(tensors: list[Tensor], values: list[torch.SymFloat]) -> None:
        with LinesMarked():
            update(*tensors, **dict(zip(numbers, values, strict=True)))

    with raised("update of the optimizer"), tracing(), quiet(), fake, traceback.preserve_node_meta():
        tensors = [torch.empty(shape, dtype=torch.float32) for _ in regions]
        values = [env.create_unbacked_symfloat() for _ in numbers]
        env.pending_fresh_unbacked_symbols.clear()  # they are inputs, and no operator's results
        graph = make_fx(functionalize(call, remove="mutations_and_views"))(tensors, values).graph
    placeholders = graph.find_nodes(op="placeholder")
    roles = {node.name: Role("input", name) for node, name in zip(placeholders, (*regions, *numbers), strict=True)}
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    outputs = tuple((node.args[1], Role("output", roles[node.args[0].name].name)) for node in writes)
    for node in writes:
        graph.erase_node(node)
    return CapturedGraph(graph, roles, outputs, {})


@contextlib.contextmanager
def _modules_marked(step: nn.Module) -> Iterator[None]:
    """While this is open, what is traced has the path of its module."""
    paths = {id(module): path for path, module in step.named_modules()}
    stack: list[tuple[str, type]] = []

    def enter(module: nn.Module, given: object) -> None:
        stack.append((paths.get(id(module), "").removeprefix("model").lstrip("."), type(module)))
        mark()

    def leave(module: nn.Module, given: object, result: object) -> None:
        stack.pop()
        mark()

    def mark() -> None:
        traceback.current_meta["nn_module_stack"] = {"": stack[-1]} if len(stack) > 1 else {}

    entering, leaving = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
    with entering, leaving, traceback.preserve_node_meta():
        yield
