"""Operators and constants of torch by their names in a PEF, and calls of them: the update of an optimizer."""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from sambasim.errors import OptionError, PefError
from sambasim.ir.graph import Argument, ComplexNumber, Graph, Ref, TorchConstant
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
    calls, left = [], {name for node in graph.nodes for name in node.results}
    left.difference_update(output.value for output in graph.outputs)
    for node in reversed(graph.nodes):
        last = [name for name in {*node.reads, *node.results} if name in left]
        left.difference_update(last)
        function = _ON_NUMBERS.get(node.operator) or find_operator(node.operator)
        arguments = [_reader(argument) for argument in node.args]
        keywords = {name: _reader(argument) for name, argument in node.kwargs}
        calls.append((node, function, arguments, keywords, last))
    calls.reverse()

    def update(parameter: Tensor, gradient: Tensor, states: Mapping[str, Tensor], given: Numbers) -> None:
        held: dict[Any, Any] = {name: float(number) for name, number in given.items()}
        held |= {**states, "parameter": parameter, "gradient": gradient}
        for node, function, arguments, keywords, last in calls:
            try:
                named = {name: read(held) for name, read in keywords.items()}
                held[node.results[0]] = function(*(read(held) for read in arguments), **named)
            except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
                what = f"the update of the optimizer {graph.name} failed: {type(error).__name__}: {error}"
                raise OptionError(what, where=str(node.source or node.name), remedy="other hyperparameters") from error
            for name in last:
                del held[name]
        for output in graph.outputs:
            held[output.symbol].copy_(held[output.value])

    return update


def _reader(argument: Argument) -> Callable[[Mapping[Any, Any]], object]:
    if isinstance(argument, Ref):
        return operator.itemgetter(argument.name)
    plain = plain_argument(argument)
    return lambda held: plain
