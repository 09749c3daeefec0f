"""How two programs differ, in words: of a PEF and a model, with the source lines of the model, or of two PEFs."""

from collections.abc import Iterator, Mapping
from itertools import count, zip_longest
from pathlib import Path
from typing import TypeAlias

from sambasim.ir.dataflow import is_clipped
from sambasim.ir.graph import Graph, Node, Output, format_argument, format_node, graph_difference, symbol_differences
from sambasim.ir.program import Program
from sambasim.ir.types import Symbol, SymbolKind
from sambasim.options.given import leaves
from sambasim.pef import PefDocument, check, map_weights
from sambasim.report.compare import differing_facts, tensor_difference
from sambasim.report.compare.tensors import compare_tensors
from sambasim.report.tables import Row
from sambasim.runtime.values.operators import find_operator

Names: TypeAlias = tuple[str, str]  # what the two are called
_TRACED, _COMPARED = ("the PEF", "the model"), ("A", "B")


def differences(compiled: Program, traced: Program) -> Iterator[str]:
    """The first difference, with the source line of the model, then what may follow from it; none if both compute the
    same. Weights, names of programs and line numbers are ignored. Symbols of data parallelism, which are named by
    digests, come last."""
    parallel = (SymbolKind.ACCUMULATION_GROUP, SymbolKind.REDUCE_BUFFER)
    symbols = compiled.symbols, traced.symbols
    before, now = ({name: one for name, one in named.items() if one.kind not in parallel} for named in symbols)
    yield from _of_symbols(before, now, _TRACED)
    if is_clipped(traced) and not is_clipped(compiled):
        yield "the optimizer has max_grad_norm, and the PEF does not clip gradients"
    yield from _of_graphs(compiled.leading, traced.leading, _TRACED)
    for group, other in zip_longest(compiled.groups, traced.groups):
        if group is None or other is None or group.members != other.members or group.optimizer != other.optimizer:
            yield "the optimizers update other groups of parameters"
    yield from _of_symbols(*symbols, _TRACED)


def _of_symbols(before: Mapping[str, Symbol], after: Mapping[str, Symbol], names: Names) -> Iterator[str]:
    for name, one, other in symbol_differences(before, after):
        has, lacks = names if one else names[::-1]
        if one and other:
            yield f"{name} is {one.kind} {one.type} in {has}, and {other.kind} {other.type} in {lacks}"
        elif symbol := one or other:
            yield f"{has} has the {symbol.kind} {name}, {symbol.type}, and {lacks} does not"


def _of_graphs(before: Graph, after: Graph, names: Names) -> Iterator[str]:
    """The first difference: the operator with its section, or an output, or how many sections there are."""
    a, b = names
    match graph_difference(before, after):
        case position, (Node() | None) as one, (Node() | None) as other:
            sections = (*before.sections, *after.sections)
            within = next((section for section in sections if section.start <= position < section.stop), None)
            where = f", section {within}" if within else ""
            apart = _of_one_operator(one, other, names)
            graphs = (before, after) if names == _COMPARED else (None, None)  # a model's line says enough
            was, now = map(described, (one, other), graphs)
            apart = apart or f"{a} has {was}, and {b} {now}"
            yield f"operator {position}{where}: {apart}"
        case (_, Output(symbol=symbol), _) | (_, _, Output(symbol=symbol)):
            yield f"{symbol} is another value of the graph in {a} than in {b}"
        case number, _, _:
            ours, theirs = len(before.sections), len(after.sections)
            how = "are cut at other places" if ours == theirs else f"are {ours} in {a} and {theirs} in {b}, others"
            yield f"the sections {how} from section {number} on"


def _of_one_operator(before: Node | None, after: Node | None, names: Names) -> str | None:
    """The difference of two nodes with one operator: in its arguments, or in which results are read."""
    if before is None or after is None or before.operator != after.operator:
        return None
    ours, theirs = _arguments(before), _arguments(after)
    a, b = names
    apart = [
        f"{name} is {ours.get(name, 'not given')} in {a}, and {theirs.get(name, 'not given')} in {b}"
        for name in dict.fromkeys([*ours, *theirs])
        if ours.get(name) != theirs.get(name)
    ]
    if apart:
        return f"{'; '.join(apart)}: an argument of {described(after)}"
    for number, (one, other) in enumerate(zip(before.results, after.results, strict=False), start=1):
        if (one is None) != (other is None):
            reads, ignores = names[::-1] if one is None else names
            return f"{reads} reads result {number} of {described(after)}, and {ignores} does not"
    return None


def _arguments(node: Node) -> Mapping[str, str]:
    """The arguments by torch's names; those of a composite node by number."""
    is_torchs = node.operator.startswith("aten.")
    names = [one.name for one in find_operator(node.operator)._schema.arguments] if is_torchs else map(str, count(1))
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return {name: format_argument(argument) for name, argument in given.items()}


def described(node: Node | None, graph: Graph | None = None) -> str:
    """A node of `graph` with its operands and the types of its results."""
    if node is None:
        return "nothing more"
    module = f" in {node.module}" if node.module else ""
    whole = f": `{format_node(graph, node).partition('  # ')[0]}`" if graph else ""
    return f"`{node.operator}`{module}" + (f" from {node.source}" if node.source else "") + whole


def compare_pefs(a: Path, b: Path) -> Row:
    ours, theirs = check(a), check(b)
    tensors, differences = 0, list[Row]()
    if ours.weights_sha256 != theirs.weights_sha256:
        tensors, differences = compare_tensors(*(map_weights(path, check=False) for path in (a, b)))
    options = differing_facts(_options(ours), _options(theirs))
    symbols, graphs = list[str](), list[str]()
    names = zip(ours.graphs, ours.graphs if ours.graphs.keys() == theirs.graphs.keys() else theirs.graphs, strict=False)
    for one, other in ((ours.graphs[first], theirs.graphs[second]) for first, second in names):
        of_symbols = _of_symbols(one.program.symbols, other.program.symbols, _COMPARED)
        symbols += (f"the symbols: {difference}" for difference in of_symbols)
        graphs += _graphs(one.program, other.program)
    equal = ours.digest == theirs.digest
    if equal:
        verdict = f"equal: both are {ours.program.name}, digest {ours.digest}"
    elif options:
        rest = f", and {len(options) - 1} more" if len(options) > 1 else ""
        verdict = f"they differ in the options: {options[0].name} {options[0].a} and {options[0].b}{rest}"
    elif symbols or graphs:
        verdict = f"they differ in {[*symbols, *graphs][0]}"
    elif differences:
        verdict = f"they differ in the weights, first {differences[0].name}: {tensor_difference(differences[0])}"
    else:
        verdict = "they differ only in layout or metadata"
    found = {"options": options, "symbols": symbols, "graphs": graphs, "tensors": tensors, "weights": differences}
    return Row(kind="pefs", a=str(a), b=str(b), equal=equal, verdict=verdict, **found)


def _options(document: PefDocument) -> Mapping[str, object]:
    program = document.program
    tables = {"compile": document.compile_options, **document.training_defaults, "data": document.data_source}
    return {
        "name": program.name,
        **({"graphs": ", ".join(document.graphs)} if document.has_several else {}),
        "batch size": program.batch_size,
        "replicas, at least": program.world_size,
        **{name: value for name, value in leaves(tables | {"metadata": document.metadata}).items() if value != {}},
        **{f"argument {argument.name}": argument.default for argument in program.runtime_arguments},
        "optimizers": ", ".join(
            f"{rule.name} ({', '.join(rule.states) or 'stateless'})" for rule in program.optimizers
        ),
        "gradient groups": ", ".join(str(group.numel) for group in program.groups),
    }


def _graphs(a: Program, b: Program) -> Iterator[str]:
    for name in ("training", "evaluation", "single"):
        ours, theirs = getattr(a, name), getattr(b, name)
        if ours and theirs:
            yield from (f"the {name} graph: {difference}" for difference in _of_graphs(ours, theirs, _COMPARED))
        elif ours or theirs:
            yield f"the graphs: only {'A' if ours else 'B'} has one for {name}"
