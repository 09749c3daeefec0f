"""Operators and constants of torch by their names in a PEF, and calls of nodes: of the update of an optimizer, say.

Whether operators accept the arguments that a graph gives them, and return tensors of the types that it states, is found
out by torch, on tensors without memory, before anything of a PEF of someone else is executed.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload

from sambasim.errors import OptionError, PefError
from sambasim.ir.dataflow import last_uses
from sambasim.ir.graph import Argument, ComplexNumber, Graph, Node, Ref, TorchConstant
from sambasim.ir.operators import NUMBERS
from sambasim.ir.program import AVERAGE, MASTER, Optimizer, Program
from sambasim.ir.types import SymbolKind, TensorType
from sambasim.optimizers import OPTIMIZERS, Numbers, OptimizerEntry, Written
from sambasim.pef.archive import COMPILE_AGAIN
from sambasim.runtime.values.memory import type_of

Function: TypeAlias = Callable[..., object]


@cache
def find_operator(name: str) -> OpOverload:
    """The operator called `name`, as in `aten.addmm.default`. Raises PefError if this torch does not have it."""
    namespace, packet, overload = name.split(".")
    try:
        operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    except AttributeError as error:
        what = f"the PEF uses {name}, which torch {torch.__version__} does not have"
        raise PefError(what, remedy="compile it again with this torch") from error
    if not isinstance(operator, OpOverload):
        raise PefError(f"the PEF uses {name}, which is no operator of torch {torch.__version__}")
    return operator


_KINDS = {kind: getattr(torch, kind) for kind in ("dtype", "layout", "memory_format", "device")}


def plain_argument(argument: Argument) -> object:
    """`argument` as torch takes it. A constant's name comes from a file: raises PefError unless it is of its kind."""
    match argument:
        case TorchConstant("device", "cpu"):
            return torch.device("cpu")
        case TorchConstant(kind, name):
            value = getattr(torch, name, None)
            if not isinstance(value, _KINDS.get(kind, ())):
                what = f"the PEF uses {name[:40]!r} as a {kind[:40]}, which torch {torch.__version__} does not have"
                raise PefError(what, remedy=COMPILE_AGAIN)
            return value
        case ComplexNumber():
            return complex(argument.real, argument.imaginary)
        case tuple():
            return [plain_argument(item) for item in argument]
    return argument


def call_of(function: Callable[..., Any], node: Node) -> Callable[[Mapping[str, Any]], Any]:
    """Calls `function` with the arguments of `node`, whose values are given by name. Raises PefError as above."""
    arguments = list(map(_reader, node.args))
    keywords = {name: _reader(argument) for name, argument in node.kwargs}

    def call(values: Mapping[str, Any]) -> Any:
        named = {name: read(values) for name, read in keywords.items()}
        return function(*(read(values) for read in arguments), **named)

    return call


def _reader(argument: Argument) -> Callable[[Mapping[str, Any]], object]:
    if isinstance(argument, Ref):
        return operator.itemgetter(argument.name)
    if isinstance(argument, tuple):
        items = list(map(_reader, argument))
        return lambda values: [read(values) for read in items]
    plain = plain_argument(argument)
    return lambda values: plain


@cache
def tensors_returned(operator: OpOverload) -> int:
    """How many tensors `operator` returns; 0 for a list of them."""
    returns = operator._schema.returns
    return len(returns) if all(str(value.type) == "Tensor" for value in returns) else 0


_FUNCTIONS = """
    mm.default addmm.default bmm.default baddbmm.default
    t.default transpose.int permute.default unsqueeze.default squeeze.dim select.int
    add.Tensor sub.Tensor mul.Tensor div.Tensor neg.default exp.default log.default sqrt.default rsqrt.default
    relu.default tanh.default sigmoid.default sum.dim_IntList mean.dim
    _log_softmax.default _log_softmax_backward_data.default _softmax.default _softmax_backward_data.default
    native_layer_norm.default clone.default embedding.default native_dropout.default
"""
_WITH_OUT = """
    mm.default addmm.default bmm.default baddbmm.default add.Tensor sub.Tensor mul.Tensor div.Tensor neg.default
    sum.dim_IntList mean.dim
"""

BUILTINS: Mapping[str, Function] = {
    **{f"aten.{name}": getattr(torch, name.partition(".")[0]) for name in _FUNCTIONS.split()},
    "aten.expand.default": Tensor.expand,
    "aten.view.default": Tensor.reshape,
}
"""By operator: a function with the same operands. `reshape` for `view` copies if a kernel returns other strides than at
capture (LSTM's backward)."""

WRITES_OUT = frozenset(f"aten.{name}" for name in _WITH_OUT.split())


def _drop_all(value: Tensor, rate: float, trains: bool) -> tuple[Tensor, Tensor]:
    """Dropout at rate 1 draws nothing in eager PyTorch; torch's kernel draws a number for each element."""
    return value * 0.0, torch.zeros_like(value, dtype=torch.bool)


@cache
def _arguments(name: str) -> tuple[list[str], list[str]]:
    """The names of the arguments of the operator called `name`; of those that are a tensor."""
    arguments = find_operator(name)._schema.arguments
    return [one.name for one in arguments], [one.name for one in arguments if str(one.type) == "Tensor"]


def builtin(node: Node) -> Function | None:
    """The function that torch generates for Python, which calls the same kernel as `torch.ops`, one to two microseconds
    faster; None if there is none, or if it might choose another overload. Raises PefError as `find_operator`."""
    names, tensors = _arguments(node.operator)
    if node.operator == "aten.native_dropout.default" and node.args[1:] == (1.0, True):
        return _drop_all
    values = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return BUILTINS.get(node.operator) if all(isinstance(values.get(name), Ref) for name in tensors) else None


_META = torch.device("meta")


def check_operators(program: Program) -> None:
    """Raises PefError for the first node that its operator cannot run, or whose values have other types. Operators
    whose results depend on values, and those that torch cannot run without memory, return what the graph states."""
    with torch.no_grad():
        for graph in program.graphs:
            _check(graph, program)


def _check(graph: Graph, program: Program) -> None:
    held: dict[str, Tensor] = {}
    for symbol in map(program.symbols.__getitem__, graph.inputs):
        takes_one = graph is program.single and symbol.kind is SymbolKind.INPUT
        shape = (1, *symbol.type.shape[1:]) if takes_one else symbol.type.shape
        held[symbol.name] = _tensor(replace(symbol.type, shape=shape))
    for node in graph.nodes:
        stated = [None if name is None else graph.values[name] for name in node.results]
        results = _results(node, held) if node.operator.startswith("aten.") else None
        if results is not None and len(results) != len(stated):
            raise wrong_number(node)
        for name, type_, result in zip(node.results, stated, results or [None] * len(stated), strict=True):
            if name is None or type_ is None:
                continue
            if results is not None and (not isinstance(result, Tensor) or type_of(result) != type_):
                what = type_of(result) if isinstance(result, Tensor) else "no tensor"
                raise _misfit(node, f"{node.operator} gives {what}, and {name} is {type_}")
            held[name] = result if isinstance(result, Tensor) else _tensor(type_)


def _results(node: Node, held: Mapping[str, Tensor]) -> Sequence[object] | None:
    """None if only values could tell."""
    operator = find_operator(node.operator)
    function: Function = builtin(node) or operator
    has_device = any(argument.name == "device" for argument in operator._schema.arguments)
    without_memory = {"device": _META} if has_device else {}
    call = call_of(lambda *args, **kwargs: function(*args, **(kwargs | without_memory)), node)
    try:
        result = call(held)
    except NotImplementedError:  # there is no kernel without memory, or the shape depends on values
        return None
    except Exception as error:  # of any kind: it is torch's word for arguments that do not fit
        said = str(error).strip().partition("\n")[0]
        raise _misfit(node, f"{node.operator} does not take its arguments: {type(error).__name__}: {said}") from error
    if not node.results:
        return ()
    return result if isinstance(result, tuple | list) else (result,)


def _tensor(type_: TensorType) -> Tensor:
    return torch.empty(type_.shape, dtype=getattr(torch, type_.dtype), device=_META)


def _misfit(node: Node, what: str) -> PefError:
    return PefError(f"node {node.name}: {what}", where=str(node.source or node.operator), remedy=COMPILE_AGAIN)


def wrong_number(node: Node) -> PefError:
    return _misfit(node, f"{node.operator} does not return the {len(node.results)} tensors that the PEF states")


_ON_NUMBERS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(operator, name[7:]) for name in NUMBERS if "sym" not in name},
    **{"number.sym_min": min, "number.sym_max": max, "number.pow": math.pow},  # whose results are no complex numbers
}


def entry_of(optimizer: Optimizer) -> OptimizerEntry:
    if optimizer.update is None:
        return OPTIMIZERS[optimizer.kind]
    states = {state: state for state in optimizer.states if state not in (MASTER, AVERAGE)}
    return OptimizerEntry({}, states, _own_update(optimizer.update))


def _own_update(graph: Graph) -> Written:
    """A function that runs `graph`, the update of an optimizer, on tensors of any length. Numbers are Python's, as in
    an eager loop. Raises OptionError if torch or Python cannot."""
    functions = [_ON_NUMBERS.get(node.operator) or find_operator(node.operator) for node in graph.nodes]
    last = last_uses(graph.nodes, {output.value for output in graph.outputs})
    calls = list(zip(graph.nodes, map(call_of, functions, graph.nodes), last, strict=True))

    def update(parameter: Tensor, gradient: Tensor, states: Mapping[str, Tensor], given: Numbers) -> None:
        held: dict[Any, Any] = {name: float(number) for name, number in given.items()}
        held |= {**states, "parameter": parameter, "gradient": gradient}
        for node, call, unread in calls:
            try:
                held[node.results[0]] = call(held)
            except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
                what = f"the update of the optimizer {graph.name} failed: {type(error).__name__}: {error}"
                raise OptionError(what, where=str(node.source or node.name), remedy="other hyperparameters") from error
            for name in unread:
                del held[name]
        for output in graph.outputs:
            held[output.symbol].copy_(held[output.value])

    return update
