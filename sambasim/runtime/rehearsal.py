"""Whether the graphs of a PEF from elsewhere are what they state: they are carried out once, on tensors without memory.

A PEF that this account compiled was made by our compiler, and is run as it is. Any other may hold nodes that no capture
gives: results far larger than stated, lists of a billion views, operands of shapes that a kernel takes for granted.
Here each node is asked for the types of its results, by PyTorch's own rules, before any memory is allocated: rule 26.
So a program can take no more memory than its manifest says, which is compared with what the machine has; and kernels
that look at nothing themselves are looked after by `unchecked_kernels`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sambasim.bounded import shortened
from sambasim.errors import MachineError, PefError
from sambasim.ir.graph import Argument, Graph, Node, Ref, TorchConstant, node_references
from sambasim.ir.operator_table import OperatorKind
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind, TensorType
from sambasim.pef.operands import check_operands
from sambasim.pef.rules import COMPILE_AGAIN, RESULTS
from sambasim.runtime.call import Makers, Types, call_of
from sambasim.runtime.capacity import available_bytes
from sambasim.runtime.instructions import find_operator, plain_argument
from sambasim.runtime.unchecked_kernels import hazard
from sambasim.units import format_bytes

_NOWHERE = torch.device("meta")

_SIZED_OTHERWISE = frozenset(
    f"aten.{name}.default" for name in ("_embedding_bag", "_embedding_bag_forward_only", "multi_margin_loss_backward")
)
"""Operators for which torch has no rule, or one that differs from the kernel: no result is larger than the operands."""


def rehearse(program: Program) -> None:
    """Checks each graph of `program`. Raises PefError for a node that breaks rule 26, and MachineError if a graph
    needs more memory at once than this machine has."""
    for graph in program.graphs:
        batch_size = 1 if graph is program.single else None
        types = {name: _at(symbol.type, symbol.kind, batch_size) for name, symbol in program.symbols.items()}
        types |= graph.values
        makers = Makers(graph)
        for node in graph.nodes:
            if not node.operator.startswith("sambasim."):
                rehearse_node(node, types, makers)
        _check_outputs(graph, program, types)
        _check_memory(graph, program)


def rehearse_node(node: Node, types: Types, makers: Makers) -> None:
    """Checks one node of a graph in which values have these `types` and `makers`. Raises PefError."""
    check_operands(node, find_operator(node.operator)._schema)
    stated = tuple(None if name is None else types[name] for name in node.results)
    fault = hazard(call_of(node, types, makers))
    if fault is None and node.operator not in _SIZED_OTHERWISE:
        found = result_types(node, types)
        if len(found) != len(stated):
            fault = f"it gives {len(found)} results"
        wrong = [(f, s) for f, s in zip(found, stated, strict=False) if s is not None and f != s]
        if fault is None and wrong:
            fault = f"it gives {wrong[0][0]}, and {wrong[0][1]} is stated"
    if fault is not None:
        raise _broken(node, fault)


def result_types(node: Node, types: Types) -> Sequence[TensorType | None]:
    """The types of `node`'s results by torch's rules, None for what is no tensor. Raises PefError if it has none."""
    operator = find_operator(node.operator)
    arguments = [_without_memory(argument, types) for argument in node.args]
    keywords = {name: _without_memory(argument, types) for name, argument in node.kwargs}
    if any(argument.name == "device" for argument in operator._schema.arguments) and not any(node_references(node)):
        keywords["device"] = _NOWHERE
    try:
        given = operator._op(*arguments, **keywords)
    except Exception as error:
        # Whatever torch says of operands that it cannot take: they are the file's.
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise _broken(node, f"PyTorch cannot say what it gives: {shortened(text)}") from error
    return [_type_of(result) for result in (given if isinstance(given, tuple | list) else (given,))]


def _at(type_: TensorType, kind: SymbolKind, batch_size: int | None) -> TensorType:
    if batch_size is None or kind is not SymbolKind.INPUT:
        return type_
    return TensorType(type_.dtype, (batch_size, *type_.shape[1:]))


def _without_memory(argument: Argument, types: Types) -> object:
    if isinstance(argument, Ref):
        type_ = types[argument.name]
        return torch.empty(type_.shape, dtype=getattr(torch, type_.dtype), device=_NOWHERE)
    if isinstance(argument, tuple):
        return [_without_memory(item, types) for item in argument]
    if isinstance(argument, TorchConstant) and argument.kind == "device":
        return _NOWHERE
    return plain_argument(argument)


def _type_of(result: object) -> TensorType | None:
    if not isinstance(result, Tensor):
        return None
    return TensorType(str(result.dtype).removeprefix("torch."), tuple(result.shape))


def _broken(node: Node, fault: str) -> PefError:
    broken = f"breaks rule {RESULTS.number} of the PEF format ({RESULTS.name})"
    what = f"node {node.name[:80]} ({node.operator}) {broken}: {fault}"
    return PefError(what, where=f"{RESULTS.part}, {node.source or node.operator}", remedy=COMPILE_AGAIN)


def _check_outputs(graph: Graph, program: Program, types: Types) -> None:
    """The training step's outputs have the types of their symbols; the loss of an evaluation is one number, or one for
    each sample."""
    for output in graph.outputs:
        symbol, kept = program.symbols[output.symbol], types[output.value]
        if graph is program.training and symbol.kind is SymbolKind.OUTPUT and kept != symbol.type:
            raise _misgiven(f"{graph.name} hands out {kept} as {symbol.name}, which is {symbol.type}")
    if graph is program.training or program.loss is None:
        return
    handed = [types[o.value] for o in graph.outputs if program.symbols[o.symbol].kind is SymbolKind.OUTPUT]
    samples = (program.batch_size,)
    wanted = samples if program.per_sample_loss and graph is program.evaluation else ()
    # A loss for each sample may still have other axes; a loss for a batch is one number, however it is shaped.
    fits = handed and (handed[0].shape[: len(wanted)] == wanted if wanted else handed[0].numel == 1)
    if not fits:
        raise _misgiven(f"{graph.name} gives {handed[0] if handed else 'nothing'} first, which is no loss")


def _misgiven(fault: str) -> PefError:
    broken = f"which breaks rule {RESULTS.number} of the PEF format ({RESULTS.name})"
    return PefError(f"{fault}: {broken}", where=RESULTS.part, remedy=COMPILE_AGAIN)


def _check_memory(graph: Graph, program: Program) -> None:
    needed, there = most_bytes(graph), available_bytes()
    if there is not None and needed > there:
        raise MachineError(
            f"the graph {graph.name} of {program.name} needs {format_bytes(needed)} at once for what it computes, "
            f"and the machine has {format_bytes(there)} of memory available",
            remedy="run it on a larger machine, or compile a smaller model or batch",
        )


def most_bytes(graph: Graph) -> int:
    """The most that the results of `graph` take at once. Views take nothing."""
    last = {
        name: position for position, node in enumerate(graph.nodes) for name in (*node_references(node), *_own(node))
    }
    freed: dict[int, list[str]] = {}
    for name, position in last.items():
        freed.setdefault(position, []).append(name)
    sizes: dict[str, int] = {}
    now = most = 0
    for position, node in enumerate(graph.nodes):
        if OPERATORS[node.operator].kind is not OperatorKind.VIEW:
            for name in _own(node):
                sizes[name] = graph.values[name].size_bytes
                now += sizes[name]
        most = max(most, now)
        now -= sum(sizes.get(name, 0) for name in freed.get(position, ()))
    return most


def _own(node: Node) -> Iterator[str]:
    return (name for name in node.results if name is not None)
