"""Whether operators accept the arguments that a graph gives them, and return tensors of the types that it states: found
out by torch, on tensors without memory, before anything of a PEF of someone else is executed."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sambasim.errors import PefError
from sambasim.ir.graph import Graph, Node
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind, TensorType
from sambasim.pef.archive import COMPILE_AGAIN
from sambasim.runtime.engine.instructions import Function, builtin
from sambasim.runtime.values.memory import type_of
from sambasim.runtime.values.operators import call_of, find_operator

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
            raise _misfit(node, f"{node.operator} does not return the {len(stated)} tensors that the PEF states")
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
    function: Function = builtin(node, operator._schema) or operator
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
