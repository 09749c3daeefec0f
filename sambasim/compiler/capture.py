"""Captures a module as functional FX graphs; the one file that uses torch's export machinery. The training step goes
through Dynamo and AOTAutograd's joint trace, which is private and tested with `TESTED_TORCH`."""

import contextlib
import io
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from itertools import count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo import functional_export
from torch._functorch._aot_autograd import descriptors as aot
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.export import ExportedProgram
from torch.export._trace import DEFAULT_EXPORT_DYNAMO_CONFIG, _ignore_backend_decomps, _restore_state_dict
from torch.export.graph_signature import InputKind, OutputKind

from sambasim.compiler.branches import Followed, Recorded, modules_marked
from sambasim.compiler.explain import tracer_error
from sambasim.compiler.names import own_name, read_by
from sambasim.compiler.precision import check_rounded, default_type, widen
from sambasim.compiler.trial import as_written, cloned, replaced, trial
from sambasim.errors import CaptureError

TESTED_TORCH = ("2.13.0",)

_UPSAMPLINGS = (
    *(f"upsample_{mode}" for mode in ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d")),
    *(f"{kind}{axes}d" for kind in ("upsample_nearest", "_upsample_nearest_exact") for axes in (1, 2, 3)),
)
_DECOMPOSED_IN_PYTHON = (
    *("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"),
    *("multi_margin_loss.default", "multilabel_margin_loss_forward.default"),
    *(f"{name}.{overload}" for name in _UPSAMPLINGS for overload in ("vec", "default")),
)
"""Operators that torch's Python kernels take apart while tracing. Those kernels lose the dropout between recurrent
layers, unroll time, change bits or are slower; without them the trace records the operator that eager PyTorch runs."""


def _mean_over(axes: int) -> Callable[[Tensor, Sequence[int]], Tensor]:
    """Adaptive pooling as torch's own kernel does it, but without `as_strided`, which only orders the memory."""
    pooled = getattr(torch.ops.aten, f"_adaptive_avg_pool{axes}d").default

    def pool(x: Tensor, sizes: Sequence[int]) -> Tensor:
        is_mean = all(size == 1 for size in sizes)
        result: Tensor = x.mean(tuple(range(-axes, 0)), keepdim=True) if is_mean else pooled(x, sizes)
        return result

    return pool


def _check_matrix(info: Tensor, api_name: str, *, is_matrix: bool) -> None:
    """What torch.linalg does to raise an error; by torch's own way it has an order of its own in the graph."""
    torch._assert_async((info == 0).all(), f"{api_name} does not work for this matrix: it is singular, say")


_POOLS = {getattr(torch.ops.aten, f"adaptive_avg_pool{axes}d").default: _mean_over(axes) for axes in (2, 3)}


fx.node.has_side_effect(torch.ops.aten._assert_async.default)  # torch itself says so of the one with a message

_GUARDS = "_suggest_or_raise_constraint_violation"
"""Where strict export builds guards for dynamic shapes, in a quarter of its time. Ours are static."""


@dataclass(frozen=True, slots=True)
class Role:
    """What an input or output of a captured graph is; `name` is the path of the tensor in the model, or the index of
    the input or output."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """A functional FX graph: the roles of its placeholders by name, its outputs in order with theirs, and the constants
    that the trace itself made."""

    graph: fx.Graph
    inputs: dict[str, Role]
    outputs: tuple[tuple[fx.Node, Role], ...]
    constants: dict[str, Tensor]

    @property
    def is_checkpointed(self) -> bool:
        """Whether a part of it was under torch.utils.checkpoint."""
        return any("recompute" in node.meta for node in self.graph.nodes)

    @property
    def cast_twice(self) -> tuple[str, ...]:
        """The parameters that several lines under torch.autocast read: PyTorch casts them once."""
        casts: Counter[str] = Counter()
        for node in self.graph.nodes:
            forward = node.meta.get("partitioner_tag") == "is_forward"
            if forward and node.target is torch.ops.aten._to_copy.default and node.args[0].name in self.inputs:
                role = self.inputs[node.args[0].name]
                casts[role.name] += role.kind == "parameter"
        return tuple(name.removeprefix("model.") for name, count in casts.items() if count > 1)

    @property
    def losses(self) -> tuple[int, ...]:
        """The indices of the outputs from which the backward starts; the first output's if there is no backward."""
        return tuple(sorted(int(role.name) for role in self.inputs.values() if role.kind == "tangent")) or (0,)


def capture_training(step: nn.Module, inputs: Sequence[Tensor], *, narrow: torch.dtype | None = None) -> CapturedGraph:
    """The joint graph of forward, loss and backward of `step`. `narrow`: the type that numbers are stored in, with
    float32 where it would not do: see `precision`. Raises CaptureError, with the user's line, for what cannot be
    traced."""
    with _tracing("training step"):
        module = _traced(step, inputs) if narrow is None else _widened(step, inputs)
        lifted = _lift_constants(module, {name for name, _ in step.named_buffers(remove_duplicate=False)}, narrow)
        with contextlib.ExitStack() as stack, default_type(torch.float32 if narrow else torch.get_default_dtype()):
            stack.enter_context(_kernels_of_eager())
            joint = aot_export_joint_with_descriptors(stack, module, tuple(inputs))
    return _described(joint.graph_module, lifted)


def capture_by_running(step: nn.Module, inputs: Sequence[Tensor]) -> CapturedGraph:
    """The graph of `step` as Python runs it, where its branches on values may be followed: see `branches`. In
    evaluation mode, the forward alone. Raises CaptureError."""
    recorded = Recorded()
    with _tracing("training step" if step.training else "evaluation graph"), as_written():
        with trial(step, cloned), torch.set_grad_enabled(step.training), recorded:
            step(*(tensor.clone() for tensor in inputs))
        with contextlib.ExitStack() as stack:
            stack.enter_context(_kernels_of_eager())
            stack.enter_context(trial(step, lambda tensor: tensor))
            stack.enter_context(modules_marked(step))
            stack.enter_context(torch.set_grad_enabled(step.training))
            with Followed(recorded):
                joint = aot_export_joint_with_descriptors(stack, step, tuple(tensor.clone() for tensor in inputs))
    return _described(joint.graph_module, {})


def _drop_as_eager(graph: fx.Graph) -> None:
    """Eager PyTorch scales a dropout's mask before it multiplies a gradient by it, which in 16 bits is rounded."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.native_dropout_backward.default):
        gradient, mask, scale = node.args
        if node.meta["val"].element_size() != _16_BITS:
            continue
        with graph.inserting_before(node):
            cast = graph.call_function(aten._to_copy.default, (mask,), {"dtype": node.meta["val"].dtype})
            scaled = graph.call_function(aten.mul.Scalar, (cast, scale))
            product = graph.call_function(aten.mul.Tensor, (gradient, scaled))
        for made in (cast, scaled, product):
            made.meta = dict(node.meta)
        node.replace_all_uses_with(product)
        graph.erase_node(node)


_16_BITS = 2


def _described(module: fx.GraphModule, lifted: Mapping[str, Tensor]) -> CapturedGraph:
    graph = module.graph
    _drop_as_eager(graph)
    roles = {node.name: _role(node.meta["desc"]) for node in graph.nodes if node.op == "placeholder"}
    output = next(iter(reversed(graph.nodes)))
    described = zip(output.args[0], output.meta["desc"], strict=True)
    outputs = tuple((value, _role(description)) for value, description in described if value is not None)
    targets = (node.target for node in graph.nodes if node.op == "get_attr")
    made = {target: attrgetter(target)(module) for target in targets}
    constants = {target: value for target, value in made.items() if isinstance(value, Tensor)}
    return CapturedGraph(graph, roles, outputs, {**lifted, **constants})


def starts_a_backward(captured: CapturedGraph, *, any_shape: bool) -> bool:
    """Whether the training step's loss is floating-point and depends on a parameter; one number, unless `any_shape`."""
    differentiable = any(role.kind == "tangent" for role in captured.inputs.values())
    loss = Role("output", str(captured.losses[0]))
    value = next(node for node, role in captured.outputs if role == loss).meta["val"]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return False
    return differentiable and (any_shape or value.numel() == 1)


def capture_evaluation(
    step: nn.Module, inputs: Sequence[Tensor], *, narrow: torch.dtype | None = None
) -> CapturedGraph:
    """The forward graph of `step` as it is set, without gradients. `narrow` and errors as in `capture_training`."""
    with _tracing("evaluation graph"), torch.no_grad():
        try:
            exported = _export(step, inputs, strict=False)
        except Exception:
            exported = _export(step, inputs, strict=True)  # its message names the user's line
        if narrow is not None:
            _check_constants(exported, narrow)
            widen(exported.graph_module)
            with default_type(torch.float32):
                exported = exported.run_decompositions({})
        else:
            called = [node.target for node in exported.graph.nodes if node.op == "call_function"]
            if any(map(_is_to_be_taken_apart, called)):
                exported = exported.run_decompositions({})
    kinds = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer", InputKind.CONSTANT_TENSOR: "constant"}
    if any(spec.kind not in (InputKind.USER_INPUT, *kinds) for spec in exported.graph_signature.input_specs):
        raise CaptureError("the evaluation graph reads an object that is no tensor")
    index = count()
    roles = {
        spec.arg.name: Role("input", str(next(index)))
        if spec.kind is InputKind.USER_INPUT
        else Role(kinds[spec.kind], str(spec.target))
        for spec in exported.graph_signature.input_specs
    }
    output = next(iter(reversed(exported.graph.nodes)))
    outputs: list[tuple[fx.Node, Role]] = []
    for value, spec in zip(output.args[0], exported.graph_signature.output_specs, strict=True):
        if spec.kind is OutputKind.USER_OUTPUT:
            outputs.append((value, Role("output", str(len(outputs)))))
        elif spec.kind is not OutputKind.BUFFER_MUTATION:
            raise CaptureError(f"the evaluation graph has an output of the kind {spec.kind.name}")
    constants = {name: value for name, value in exported.constants.items() if isinstance(value, Tensor)}
    return CapturedGraph(exported.graph, roles, tuple(outputs), constants)


def _is_to_be_taken_apart(called: object) -> bool:
    """Whether an operator changes its operands, or is a block of others, as under torch.autocast."""
    if isinstance(called, torch._ops.OpOverload):
        return called._schema.is_mutable
    return isinstance(called, torch._ops.HigherOrderOperator)


def _check_constants(exported: ExportedProgram, narrow: torch.dtype) -> None:
    """Raises CaptureError for constants of another type than `narrow`, but for those that the forward itself
    makes: those are copied before they are read, and rounded there."""
    paths = {
        spec.arg.name: str(spec.target)
        for spec in exported.graph_signature.input_specs
        if spec.kind is InputKind.CONSTANT_TENSOR
    }
    for node in exported.graph.nodes:
        if node.name in paths and any(user.target != torch.ops.aten.lift_fresh_copy.default for user in node.users):
            check_rounded(paths[node.name], exported.constants[paths[node.name]], narrow, read_by(node))


def _export(step: nn.Module, inputs: Sequence[Tensor], *, strict: bool) -> ExportedProgram:
    with _quiet():
        return torch.export.export(step, tuple(inputs), strict=strict)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Where Dynamo fails, it prints the graph so far on top of its message."""
    dropped = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stderr(dropped))
        stack.enter_context(contextlib.redirect_stdout(dropped))
        stack.enter_context(as_written())
        if hasattr(functional_export, _GUARDS):  # an untested torch may build guards in another way
            stack.enter_context(replaced(functional_export, _GUARDS, lambda *args: None))
        yield


def _traced(step: nn.Module, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """What strict export starts from: calls of torch, with the user's own autograd Functions whole."""
    given = [tensor.clone() for tensor in inputs]  # one tensor given twice would be one input
    settings = asdict(DEFAULT_EXPORT_DYNAMO_CONFIG)
    with _quiet(), torch._dynamo.config.patch(settings), _ignore_backend_decomps():
        module = functional_export._dynamo_graph_capture_for_export(step)(*given)
    _restore_state_dict(step, module)
    own = {name for name, _ in step.named_parameters(remove_duplicate=False)}
    for name, _ in module.named_parameters():
        if name not in own:
            raise CaptureError(f"the training step reads {own_name(name)}, a parameter that is none of the model's")
    return module


def _widened(step: nn.Module, inputs: Sequence[Tensor]) -> fx.GraphModule:
    """The step in operators of ATen, with float32 where a narrow type would not do."""
    exported = _export(step, inputs, strict=True)
    widen(exported.graph_module)
    return exported.module(check_guards=False)


def _lift_constants(module: fx.GraphModule, known: Set[str], narrow: torch.dtype | None) -> dict[str, Tensor]:
    """Make buffers of the tensors that `module` reads and that are no buffers of the model, which are `known`, since
    the joint trace has buffers as inputs. Raises CaptureError for those that are not rounded."""
    constants = {}
    for node in module.graph.nodes:
        is_new = node.op == "get_attr" and node.target not in known
        value = attrgetter(node.target)(module) if is_new else None
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            if narrow is not None:
                check_rounded(node.target, value, narrow, read_by(node))
            constants[node.target] = value
    for path, value in constants.items():
        owner, _, name = path.rpartition(".")
        delattr(module.get_submodule(owner), name)
        module.get_submodule(owner).register_buffer(name, value, persistent=False)
    return constants


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
def _kernels_of_eager() -> Iterator[None]:
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    keys = (torch._C.DispatchKey.Autograd, composite)
    removed = []
    for name in _DECOMPOSED_IN_PYTHON:
        packet, overload = name.split(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload)
        for key in keys:
            if key in operator.py_kernels:
                removed.append((operator, key, operator.py_kernels.pop(key)))
        operator._dispatch_cache.clear()
    added: list[tuple[Any, Any, Callable[..., object]]]
    added = [(operator, composite, pool) for operator, pool in _POOLS.items()]
    added.append((torch.ops.aten._linalg_check_errors.default, torch._C.DispatchKey.AutogradCPU, _check_matrix))
    for operator, key, kernel in added:
        operator.py_kernels[key] = kernel
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, key, kernel in removed:
            operator.py_kernels[key] = kernel
            operator._dispatch_cache.clear()
        for operator, key, _ in added:
            del operator.py_kernels[key]
            operator._dispatch_cache.clear()


@contextlib.contextmanager
def _tracing(what: str) -> Iterator[None]:
    """What torch raises becomes a CaptureError, and what it prints beside that is dropped."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # torch logs what it raises, at length; the error below says it once
    said = io.StringIO()  # and prints the graph that it had so far
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore")  # about side effects of library code, which tracing keeps harmless
            yield
    except CaptureError:
        raise
    except (Exception, SystemExit) as error:
        raise tracer_error(what, error) from error
    finally:
        logging.disable(disabled)
    sys.stderr.write(said.getvalue())  # the user's own prints
