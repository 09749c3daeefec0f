"""Where two programs begin to differ: the one in a PEF, and the one that the app's model makes now."""

from collections.abc import Mapping
from itertools import count, zip_longest

from sambasim.ir.graph import Node, node_references
from sambasim.ir.numbered import numbered, numbered_output
from sambasim.ir.numbered import numbers as number_values
from sambasim.ir.printer import format_argument
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.runtime.instructions import find_operator

_OF_DATA_PARALLEL = (SymbolKind.ACCUMULATION_GROUP, SymbolKind.REDUCE_BUFFER)


def first_difference(compiled: Program, traced: Program) -> str | None:
    """What differs first, with the source line of the model; None if the two run alike.

    Weights, names of programs and line numbers may differ.
    """
    return (
        _symbols(_own(compiled), _own(traced))
        or _graphs(compiled, traced)
        or _optimizers(compiled, traced)
        or _symbols(compiled.symbols, traced.symbols)
    )


def first_use(program: Program, name: str) -> str:
    """Which operator reads `name` first, with the source line of the model, to follow the name."""
    graphs = [graph for graph in (program.training, program.evaluation) if graph is not None]
    node = next((node for graph in graphs for node in graph.nodes if name in node_references(node)), None)
    return "" if node is None else f", which is read by {_told(node)},"


def _own(program: Program) -> Mapping[str, Symbol]:
    """The symbols that the model has, without what data parallelism adds: those are named by digests."""
    return {name: symbol for name, symbol in program.symbols.items() if symbol.kind not in _OF_DATA_PARALLEL}


def _symbols(compiled: Mapping[str, Symbol], traced: Mapping[str, Symbol]) -> str | None:
    for name in [*compiled, *(name for name in traced if name not in compiled)]:
        before, now = compiled.get(name), traced.get(name)
        if before is None and now is not None:
            return f"the model has the {now.kind} {name}, {now.type}, and the PEF does not"
        if before is not None and now is None:
            return f"the PEF has the {before.kind} {name}, {before.type}, and the model does not"
        if before and now and (before.kind, before.type) != (now.kind, now.type):
            return f"{name} is {before.kind} {before.type} in the PEF, and {now.kind} {now.type} in the model"
    return None


def _graphs(compiled: Program, traced: Program) -> str | None:
    before, now = compiled.training or compiled.evaluation, traced.training or traced.evaluation
    numbers: tuple[dict[str, str], dict[str, str]] = number_values(before), number_values(now)
    for one, other in zip_longest(before.nodes, now.nodes):
        if numbered(one, numbers[0]) != numbered(other, numbers[1]):
            return _of_one_operator(one, other) or f"the PEF has {_told(one)}, and the model {_told(other)}"
    for output, now_output in zip_longest(before.outputs, now.outputs):
        if numbered_output(output, numbers[0]) != numbered_output(now_output, numbers[1]):
            return f"{(output or now_output).symbol} is another value of the graph in the PEF than in the model"
    sections = [[(section.kind, section.start, section.stop) for section in graph.sections] for graph in (before, now)]
    return None if sections[0] == sections[1] else "the sections are cut at other places"


def _optimizers(compiled: Program, traced: Program) -> str | None:
    for before, now in zip_longest(compiled.groups, traced.groups):
        if before is None or now is None or before.members != now.members or before.optimizer != now.optimizer:
            return "the optimizers update other groups of parameters"
    return None


def _of_one_operator(compiled: Node | None, traced: Node | None) -> str | None:
    """Of two nodes with one operator: which of its arguments differ, or which of its results is read."""
    if compiled is None or traced is None or compiled.operator != traced.operator:
        return None
    before, now = _arguments(compiled), _arguments(traced)
    apart = [
        f"{name} is {before.get(name, 'not given')} in the PEF, and {now.get(name, 'not given')} in the model"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    if apart:
        return f"{'; '.join(apart)}: an argument of {_told(traced)}"
    for number, (one, other) in enumerate(zip(compiled.results, traced.results, strict=False), start=1):
        if (one is None) != (other is None):
            reads, ignores = ("model", "PEF") if one is None else ("PEF", "model")
            return f"the {reads} reads result {number} of {_told(traced)}, and the {ignores} does not"
    return None


def _arguments(node: Node) -> Mapping[str, str]:
    """By the names that torch has for them; a composite's by their number."""
    is_torchs = node.operator.startswith("aten.")
    names = [one.name for one in find_operator(node.operator)._schema.arguments] if is_torchs else map(str, count(1))
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return {name: format_argument(argument) for name, argument in given.items()}


def _told(node: Node | None) -> str:
    if node is None:
        return "nothing more"
    module = f" in {node.module}" if node.module else ""
    return f"`{node.operator}`{module}" + (f" from {node.source}" if node.source else "")
