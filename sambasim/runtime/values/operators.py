"""Operators and constants of torch by their names in a PEF, and calls of nodes: of the update of an optimizer, say."""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from sambasim.errors import OptionError, PefError
from sambasim.ir.dataflow import last_uses
from sambasim.ir.graph import Argument, ComplexNumber, Graph, Node, Ref, TorchConstant
from sambasim.ir.operators import NUMBERS
from sambasim.ir.program import AVERAGE, MASTER, Optimizer
from sambasim.optimizers import OPTIMIZERS, Numbers, OptimizerEntry, Written
from sambasim.pef.archive import COMPILE_AGAIN


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
