"""Where two PEFs differ: options, symbols, the first operator of each graph, weights."""

from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest

from torch import Tensor

from sambasim.ir.graph import Graph, Node
from sambasim.ir.numbered import numbered, numbered_output, numbers
from sambasim.ir.printer import format_node
from sambasim.ir.program import Program
from sambasim.pef import PefDocument
from sambasim.report.compare.facts import facts
from sambasim.report.compare.result import Fact, PefsCompared
from sambasim.report.compare.tensors import compare_tensors, told

_Weights = Callable[[], Mapping[str, Tensor]]


def compare_pefs(
    a: tuple[str, PefDocument], b: tuple[str, PefDocument], weights: tuple[_Weights, _Weights]
) -> PefsCompared:
    """Two PEFs, each with its path. `weights` reads theirs, and is called only if they differ."""
    ours, theirs = a[1], b[1]
    same_weights = ours.weights_sha256 == theirs.weights_sha256
    tensors, apart = (0, ()) if same_weights else compare_tensors(weights[0](), weights[1]())
    options = facts(_options(ours), _options(theirs))
    symbols = tuple(_symbols(ours.program, theirs.program))
    graphs = tuple(_graphs(ours.program, theirs.program))
    alike = ours.digest == theirs.digest
    found = [f"the options: {_facts(options)}"] if options else []
    found += [symbols[0]] if symbols else []
    found += [graphs[0]] if graphs else []
    found += [f"the weights, first {apart[0].name}: {told(apart[0])}"] if apart else []
    return PefsCompared(
        a=a[0],
        b=b[0],
        alike=alike,
        verdict=_verdict(ours, alike=alike, found=found),
        options=options,
        symbols=symbols,
        graphs=graphs,
        tensors=tensors,
        weights=apart,
    )


def _verdict(ours: PefDocument, *, alike: bool, found: list[str]) -> str:
    if alike:
        return f"alike: both are {ours.program.name}, digest {ours.digest}"
    return f"they differ in {found[0]}" if found else "they differ in their layout or their metadata alone"


def _facts(options: tuple[Fact, ...]) -> str:
    first, rest = options[0], len(options) - 1
    return f"{first.name} {first.a} and {first.b}" + (f", and {rest} more" if rest else "")


def _options(document: PefDocument) -> Mapping[str, object]:
    """Everything beside the program, by dotted name."""
    program = document.program
    return {
        "name": program.name,
        "batch size": program.batch_size,
        "replicas, at least": program.world_size,
        **dict(_leaves("compile", document.compile_options)),
        **dict(_leaves("", document.training_defaults)),
        **dict(_leaves("data", document.data_source)),
        **dict(_leaves("metadata", document.metadata)),
        **{f"argument {one.name}": one.default for one in program.runtime_arguments},
        "optimizers": ", ".join(f"{one.name} ({', '.join(one.states) or 'stateless'})" for one in program.optimizers),
        "gradient groups": ", ".join(str(group.numel) for group in program.groups),
    }


def _leaves(name: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(f"{name}.{key}" if name else str(key), below)
    else:
        yield name, value


def _symbols(a: Program, b: Program) -> Iterator[str]:
    for name in dict.fromkeys((*a.symbols, *b.symbols)):
        one, other = a.symbols.get(name), b.symbols.get(name)
        if one is None and other is not None:
            yield f"the symbols: only B has the {other.kind} {name}, {other.type}"
        elif one is not None and other is None:
            yield f"the symbols: only A has the {one.kind} {name}, {one.type}"
        elif one and other and (one.kind, one.type) != (other.kind, other.type):
            yield f"the symbols: {name} is {one.kind} {one.type} in A, and {other.kind} {other.type} in B"


def _graphs(a: Program, b: Program) -> Iterator[str]:
    for name in ("training", "evaluation", "single"):
        one, other = getattr(a, name), getattr(b, name)
        if one is None and other is None:
            continue
        if one is None or other is None:
            yield f"the graphs: only {'B' if one is None else 'A'} has one for {name}"
        elif (found := _first_difference(one, other)) is not None:
            yield f"the {name} graph: {found}"


def _first_difference(a: Graph, b: Graph) -> str | None:
    places = numbers(a), numbers(b)
    for position, (one, other) in enumerate(zip_longest(a.nodes, b.nodes)):
        if numbered(one, places[0]) != numbered(other, places[1]):
            return f"operator {position}{_section(a, b, position)}: {_told(a, one)} in A, {_told(b, other)} in B"
    for left, right in zip_longest(a.outputs, b.outputs):
        if numbered_output(left, places[0]) != numbered_output(right, places[1]):
            return f"{(left or right).symbol} is another value"
    cuts = [[(section.kind, section.start, section.stop) for section in graph.sections] for graph in (a, b)]
    for number, (left_cut, right_cut) in enumerate(zip_longest(*cuts)):
        if left_cut != right_cut:
            return (
                f"the sections are cut otherwise, from section {number} on: {len(cuts[0])} and {len(cuts[1])} of them"
            )
    return None


def _section(a: Graph, b: Graph, position: int) -> str:
    """The section in which a node is, in A or else in B."""
    for graph in (a, b):
        for section in graph.sections:
            if section.start <= position < section.stop:
                return f", section {section.index} {section.kind} {section.name}"
    return ""


def _told(graph: Graph, node: Node | None) -> str:
    if node is None:
        return "nothing more"
    line = format_node(graph, node)
    return f"`{line.partition('  # ')[0]}`" + (f" from {node.source}" if node.source else "")
