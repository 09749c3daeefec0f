"""Captures a module as functional FX graphs; the one file that uses torch's export machinery. The training step goes
through Dynamo and AOTAutograd's joint trace, which is private and tested with `TESTED_TORCH`."""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from operator import attrgetter
from typing import TypeGuard

import torch
from torch import Tensor, fx, nn
from torch._dynamo import functional_export, trace_rules
from torch._dynamo.variables import torch as dynamo
from torch._functorch._aot_autograd import descriptors as aot
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.export._trace import DEFAULT_EXPORT_DYNAMO_CONFIG, _ignore_backend_decomps, _restore_state_dict
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils._pytree import tree_leaves

from sambasim.compiler.as_eager import drop_as_eager, kernels_of_eager, known_shapes, strided_in_order
from sambasim.compiler.asked_values import Followed, Recorded
from sambasim.compiler.captured import CapturedGraph, Role, complex_constants, restore_strides
from sambasim.compiler.explain import SHAPE, tracer_error
from sambasim.compiler.line_marks import modules_marked
from sambasim.compiler.names import own_name, read_by, source_line
from sambasim.compiler.precision import check_rounded, default_type, widen
from sambasim.compiler.trial import as_written, cloned, replaced, tied_once, tracing, trial
from sambasim.errors import CaptureError
from sambasim.ir.operators import OPERATORS

TESTED_TORCH = ("2.13.0",)

fx.node.has_side_effect(torch.ops.aten._assert_async.default)  # torch itself says so of the one with a message

_GUARDS = "_suggest_or_raise_constraint_violation"
"""Where strict export builds guards for dynamic shapes, in a quarter of its time. Ours are static."""


def capture_training(step: nn.Module, inputs: Sequence[Tensor], *, narrow: torch.dtype | None = None) -> CapturedGraph:
    """The joint graph of forward, loss and backward of `step`. `narrow`: the type that numbers are stored in, with
    float32 where it would not do: see `precision`. Raises CaptureError, with the user's line, for what cannot be
    traced."""
    with _tracing("training step"):
        module = _traced(step, inputs) if narrow is None else _widened(step, inputs)
        lifted = _lift_constants(module, {name for name, _ in step.named_buffers(remove_duplicate=False)}, narrow)
        with contextlib.ExitStack() as stack, default_type(torch.float32 if narrow else torch.get_default_dtype()):
            stack.enter_context(kernels_of_eager())
            joint = aot_export_joint_with_descriptors(stack, module, tuple(inputs))
    return _described(joint.graph_module, lifted)


def capture_by_running(step: nn.Module, inputs: Sequence[Tensor]) -> CapturedGraph:
    """The graph of `step` as Python runs it, where its branches on values may be followed: see `asked_values`. In
    evaluation mode, the forward alone. Raises CaptureError."""
    recorded = Recorded()
    with _tracing("training step" if step.training else "evaluation graph"), as_written():
        with trial(step, cloned), torch.set_grad_enabled(step.training), recorded:
            step(*(tensor.clone() for tensor in inputs))
        with contextlib.ExitStack() as stack:
            stack.enter_context(kernels_of_eager())
            stack.enter_context(trial(step, lambda tensor: tensor))
            stack.enter_context(tied_once(step))
            stack.enter_context(modules_marked(step))
            stack.enter_context(torch.set_grad_enabled(step.training))
            with contextlib.closing(Followed(recorded, step)) as followed, followed:
                joint = aot_export_joint_with_descriptors(stack, step, tuple(tensor.clone() for tensor in inputs))
        with trial(step, cloned), torch.set_grad_enabled(step.training):
            followed.check_constants(lambda: step(*(tensor.clone() for tensor in inputs)))
    captured = _described(joint.graph_module, {})
    if step.training:
        return captured
    outputs = tuple((value, role) for value, role in captured.outputs if role.kind == "output")
    return replace(captured, outputs=outputs)  # without buffers that it would change


def capture_shapes(step: nn.Module, inputs: Sequence[Tensor]) -> CapturedGraph:
    """The joint graph of `step` as Python runs it once, on fake tensors: several times quicker than `capture_training`.
    Raises CaptureError where a branch depends on a value, and for what torch cannot trace."""
    with _tracing("training step"), as_written(), contextlib.ExitStack() as stack:
        for context in (kernels_of_eager(), trial(step, lambda one: one), tied_once(step), modules_marked(step)):
            stack.enter_context(context)
        joint = aot_export_joint_with_descriptors(stack, step, tuple(inputs))
    return _described(joint.graph_module, {})


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


def _described(module: fx.GraphModule, lifted: Mapping[str, Tensor]) -> CapturedGraph:
    graph = module.graph
    _check_static(graph)
    drop_as_eager(graph)
    strided_in_order(graph)
    roles = {node.name: _role(node.meta["desc"]) for node in graph.nodes if node.op == "placeholder"}
    output = next(iter(reversed(graph.nodes)))
    described = zip(output.args[0], output.meta["desc"], strict=True)
    outputs = tuple((value, _role(description)) for value, description in described if value is not None)
    targets = (node.target for node in graph.nodes if node.op == "get_attr")
    made = {target: attrgetter(target)(module) for target in targets}
    constants = {target: value for target, value in made.items() if isinstance(value, Tensor)}
    return complex_constants(restore_strides(CapturedGraph(graph, roles, outputs, _checked({**lifted, **constants}))))


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
            exported = _taken_apart(exported)
    _check_static(exported.graph)
    strided_in_order(exported.graph)
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
    return complex_constants(restore_strides(CapturedGraph(exported.graph, roles, tuple(outputs), _checked(constants))))


def _taken_apart(exported: ExportedProgram) -> ExportedProgram:
    """`exported` without operators that consist of others, such as `stft`, of which one consists of the other."""
    before: set[object] = set()
    while True:
        called = {node.target for node in exported.graph.nodes if node.op == "call_function"}
        apart = {one for one in called if _is_to_be_taken_apart(one)}
        if apart <= before:
            return exported
        exported = exported.run_decompositions({one: _by_others(one) for one in apart if _is_composite(one)})
        before |= apart


def _is_to_be_taken_apart(called: object) -> bool:
    """Whether an operator changes its operands, consists of others, or is a block of them, as under torch.autocast."""
    if isinstance(called, OpOverload):
        return called._schema.is_mutable or _is_composite(called)
    return isinstance(called, HigherOrderOperator)


def _is_composite(called: object) -> TypeGuard[OpOverload]:
    """Whether torch defines an operator by others, and no PEF can hold it. `multiply` is another name of `mul`, say."""
    if not isinstance(called, OpOverload) or str(called) in OPERATORS:
        return False
    name: str = called.name()  # type: ignore[no-untyped-call]  # torch's, untyped
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, _COMPOSITE)


_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def _by_others(operator: OpOverload) -> Callable[..., object]:
    """torch's definition of a composite operator."""
    return partial(operator._op_dk, _COMPOSITE)


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
        stack.enter_context(torch._dynamo.config.patch(trace_numpy=False))  # its own NumPy rounds otherwise
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


_WHETHER_COMPILED = (torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch._dynamo.is_compiling)


@contextlib.contextmanager
def answers_of_eager(*, compiled: bool) -> Iterator[None]:
    """Within this context, `is_exporting()` returns False, so that a model takes its eager path; so do `is_compiling()`
    and `is_dynamo_compiling()`, unless it is `compiled`."""
    trace_rules.get_torch_obj_rule_map()  # torch caches it for the process: before its functions are replaced
    answers = dict(dynamo.tracing_state_functions())
    names = ["is_exporting"]
    if not compiled:
        answers.update(dict.fromkeys(_WHETHER_COMPILED, False))
        names += ["is_compiling", "is_dynamo_compiling"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(dynamo, "tracing_state_functions", lambda: answers))
        for name in names:
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
    except CaptureError:
        raise
    except (Exception, SystemExit) as error:
        raise tracer_error(what, error) from error
    finally:
        logging.disable(disabled)
    sys.stderr.write(said.getvalue())  # the user's own prints
