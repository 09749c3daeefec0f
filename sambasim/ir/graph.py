"""The graph: functional ATen operators in execution order, and the sections that cut it; its printed form, and where
two graphs first differ. Arguments are a small closed language, so a graph needs no torch."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import zip_longest
from typing import TypeAlias

from typing_extensions import TypeAliasType

from sambasim.ir.types import VALUE_BYTES, Count, Symbol, TensorType

MADE_AGAIN = "__again"
"""The end of the names of nodes and values that recomputation repeats."""

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
"""Names come from files: what is printed must not move the cursor of the reader's terminal."""


@dataclass(frozen=True, slots=True)
class Ref:
    """The value called `name`: a symbol, or the result of an earlier node."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchConstant:
    """`torch.float32`, `torch.strided`, `torch.channels_last`, `torch.device("cpu")`: `kind` and `name`."""

    kind: str  # dtype | layout | memory_format | device
    name: str


@dataclass(frozen=True, slots=True)
class ComplexNumber:
    real: float
    imaginary: float


TORCH_CONSTANTS: Mapping[str, frozenset[str]] = {
    "dtype": frozenset(VALUE_BYTES),
    "layout": frozenset({"strided"}),
    "memory_format": frozenset({"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}),
    "device": frozenset({"cpu"}),
}
"""By kind: the names that a constant of torch may have. Closed, since a reader looks them up in torch."""

Argument = TypeAliasType(
    "Argument", "bool | int | float | str | Ref | TorchConstant | ComplexNumber | tuple[Argument, ...] | None"
)


@dataclass(frozen=True, slots=True)
class SourceLine:
    file: str
    line: Count
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.code}"


@dataclass(frozen=True)
class Node:
    """One operator. `results` name the values it defines, None where nobody reads one. `module` is the dotted path of
    the `nn.Module` that ran it; a backward operator has its forward's."""

    name: str
    operator: str
    args: tuple[Argument, ...] = ()
    kwargs: tuple[tuple[str, Argument], ...] = ()
    results: tuple[str | None, ...] = ()
    module: str = ""
    source: SourceLine | None = None

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The names of all values that it reads, in order, repeats included."""
        return tuple(argument.name for argument in leaves((self.args, self.kwargs)) if isinstance(argument, Ref))

    @cached_property
    def makes(self) -> tuple[str, ...]:
        """The names of its results, without those that nothing reads."""
        return tuple(name for name in self.results if name is not None)


class SectionKind(StrEnum):
    """The purpose of a section, by SambaFlow's names. Sections are ordered by what they read and write, not by kind."""

    FWD = "FWD"
    BCKWD = "BCKWD"
    REDUCE = "REDUCE"
    GRADNORM = "GRADNORM"
    OPT = "OPT"
    GATHER = "GATHER"


@dataclass(frozen=True, slots=True)
class Section:
    """A unit of execution: nodes `start` up to `stop` of its graph. `stage`: of a pipeline, for sections of a
    pass; `weights_only`: of a backward, the gradients of weights, which a schedule may run later than the rest."""

    index: Count
    kind: SectionKind
    name: str
    start: Count
    stop: Count
    stage: Count = 0
    weights_only: bool = False

    def __str__(self) -> str:
        return f"{self.index} {self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Output:
    """After the graph has run, `symbol` holds `value`."""

    value: str
    symbol: str


@dataclass(frozen=True, slots=True)
class Graph:
    """One executable graph. `values` holds the type of every result; symbols have their own."""

    name: str
    inputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Output, ...]
    values: Mapping[str, TensorType]
    sections: tuple[Section, ...] = ()

    def types(self, symbols: Mapping[str, Symbol]) -> Mapping[str, TensorType]:
        """Of its values and of `symbols`, by name."""
        return {name: symbol.type for name, symbol in symbols.items()} | dict(self.values)

    @property
    def section_counts(self) -> Mapping[str, int]:
        """How many sections there are of each kind."""
        return Counter(section.kind.value for section in self.sections)

    def section_nodes(self, section: Section) -> tuple[Node, ...]:
        return self.nodes[section.start : section.stop]

    def nodes_in(self, sections: Iterable[Section]) -> Iterator[tuple[Section, Node]]:
        """The nodes of `sections`, in order, each with its section."""
        return ((section, node) for section in sections for node in self.section_nodes(section))

    def nodes_of(self, kind: SectionKind) -> list[Node]:
        """The nodes of all sections of `kind`, in order."""
        return [node for section in self.sections if section.kind is kind for node in self.section_nodes(section)]


def with_sections(graph: Graph, parts: Iterable[tuple[Section, Iterable[Node]]]) -> Graph:
    """`graph` of these sections and their nodes, in this order; a section without nodes is left out."""
    nodes: list[Node] = []
    sections: list[Section] = []
    for section, members in parts:
        start = len(nodes)
        nodes += members
        if len(nodes) > start:
            sections.append(replace(section, index=len(sections), start=start, stop=len(nodes)))
    return replace(graph, nodes=tuple(nodes), sections=tuple(sections))


def leaves(arguments: tuple[Argument, ...]) -> list[Argument]:
    """`arguments`, in order, with what is in a tuple in its place."""
    found: list[Argument] = []
    for argument in arguments:
        found += leaves(argument) if isinstance(argument, tuple) else [argument]
    return found


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """`node`, reading values by other names: `names` has the new one of each value that changes."""

    def rename(argument: Argument) -> Argument:
        if isinstance(argument, Ref):
            return Ref(names.get(argument.name, argument.name))
        return tuple(map(rename, argument)) if isinstance(argument, tuple) else argument

    if all(names.get(name, name) == name for name in node.reads):
        return node
    kwargs = tuple((key, rename(value)) for key, value in node.kwargs)
    return replace(node, args=tuple(map(rename, node.args)), kwargs=kwargs)


def format_graph(graph: Graph, symbols: Mapping[str, Symbol]) -> str:
    """For people and for golden files: one line for each node, sections as headings."""
    held = (f"{symbols[name].type} {symbols[name].kind}" if name in symbols else "of update" for name in graph.inputs)
    inputs = [f"  %{name} : {what}" for name, what in zip(graph.inputs, held, strict=True)]
    lines = [f"graph {graph.name}(", *inputs, ")"]
    for section in graph.sections:
        lines += format_section(graph, section)
    lines.append("return")
    for output in graph.outputs:
        type_ = graph.values.get(output.value) or symbols[output.value].type
        lines.append(f"  %{output.value} -> {output.symbol} : {type_}")
    return "".join(f"{line.translate(_CONTROLS)}\n" for line in lines)


def format_section(graph: Graph, section: Section) -> list[str]:
    heading = f"section {section}"
    return [heading.translate(_CONTROLS), *(f"  {format_node(graph, node)}" for node in graph.section_nodes(section))]


def format_node(graph: Graph, node: Node) -> str:
    """One line: results, operator, arguments, types of the results, file and line of the user's program."""
    arguments = [*map(format_argument, node.args), *(f"{key}={format_argument(given)}" for key, given in node.kwargs)]
    line = f"{node.operator}({', '.join(arguments)})"
    if node.results:
        names = ", ".join("_" if result is None else f"%{result}" for result in node.results)
        types = ", ".join("_" if result is None else str(graph.values[result]) for result in node.results)
        line = f"{names} = {line} : {types}"
    if node.source is not None:
        line += f"  # {node.source.file}:{node.source.line}"
    return line.translate(_CONTROLS)


def format_argument(argument: Argument) -> str:
    """`%x` for a reference, `torch.float32` for a constant of torch, `(1, 2)` for a tuple, the rest as in Python."""
    match argument:
        case ComplexNumber(real, imaginary):
            return repr(complex(real, imaginary))
        case Ref(name):
            return f"%{name}"
        case TorchConstant("device", name):
            return f'device("{name}")'
        case TorchConstant(_, name):
            return f"torch.{name}"
        case tuple():
            return f"({', '.join(map(format_argument, argument))}{',' if len(argument) == 1 else ''})"
    return repr(argument)


Part: TypeAlias = Node | Output | Section


def graph_difference(before: Graph, after: Graph) -> tuple[int, Part | None, Part | None] | None:
    """The position of the first nodes, or else outputs, or else sections, that differ but in names and lines, and both;
    None where one graph has no more."""
    for parts, others in zip(_compared(before), _compared(after), strict=True):
        pairs = zip_longest(parts, others, fillvalue=(None, None))
        for position, ((content, part), (other_content, other)) in enumerate(pairs):
            if content != other_content:
                return position, part, other
    return None


def symbol_differences(
    before: Mapping[str, Symbol], after: Mapping[str, Symbol]
) -> Iterator[tuple[str, Symbol | None, Symbol | None]]:
    """The name and both symbols where kind or type differ, in the order of `before`; None where one does not exist."""
    for name in dict.fromkeys((*before, *after)):
        symbols = before.get(name), after.get(name)
        kinds = [symbol and (symbol.kind, symbol.type) for symbol in symbols]
        if kinds[0] != kinds[1]:
            yield name, *symbols


def _compared(graph: Graph) -> Iterator[Iterable[tuple[object, Part]]]:
    """The nodes, the outputs and the sections, each after what is compared of it, with numbers for names of values."""
    numbers = {
        name: f"{position}.{result}"
        for position, node in enumerate(graph.nodes)
        for result, name in enumerate(node.results)
        if name is not None
    }

    def numbered(node: Node) -> Node:
        results = tuple(name and numbers[name] for name in node.results)
        return replace(renamed(node, numbers), name="", source=None, results=results)

    yield ((numbered(node), node) for node in graph.nodes)
    yield (((output.symbol, numbers.get(output.value, output.value)), output) for output in graph.outputs)
    yield (((section.kind, section.start, section.stop), section) for section in graph.sections)
