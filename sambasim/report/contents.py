"""The content of a PEF as facts: what `sambasim inspect --json` prints and the tables of `report.inspect` show.

The traffic of a section is computed from the types in the graph. A value that enters counts once, however many nodes
read it; a value leaves if a later section reads it or it is an output. These are sizes of values, not measurements, and
views count as their full size. Composite operators work on the flat tensors of their groups:

    opt.<kind>           reads parameters, gradients and states; writes parameters and states
    opt.square_sums      reads gradients
    comm.reduce_scatter  reads and writes gradients
    comm.all_gather      reads and writes parameters
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue

from sambasim.ir.graph import Graph, Node, node_references
from sambasim.ir.operators import OPERATORS
from sambasim.ir.printer import format_graph
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.types import DTYPE_BYTES, SymbolKind
from sambasim.pef import PefDocument, PefHeader


class _Facts(BaseModel):
    # JSON has no infinity, and "Infinity" is clearer than null.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class SectionFacts(_Facts):
    """One section. `in_bytes` and `out_bytes` are of the values that enter and leave it."""

    index: int
    kind: str
    name: str
    operators: int
    in_bytes: int
    out_bytes: int


class OperatorFacts(_Facts):
    """One operator, the number of nodes that have it, and the source lines that they come from."""

    kind: str
    operator: str
    count: int
    sources: tuple[str, ...]


class GraphFacts(_Facts):
    """One graph: sections, operators by kind, and the symbols that are its inputs and outputs."""

    name: str
    nodes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sections: tuple[SectionFacts, ...]
    operators: tuple[OperatorFacts, ...]


class SymbolFacts(_Facts):
    """One symbol."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    offset: int | None
    torch_names: tuple[str, ...]


class GroupFacts(_Facts):
    """One parameter group. `gradient_symbol` holds its gradients for data parallelism; None without."""

    name: str
    dtype: str
    parameters: int
    elements: int
    size_bytes: int
    optimizer: str
    gradient_symbol: str | None


class RuntimeArgumentFacts(_Facts):
    """One scalar that a run may set."""

    name: str
    default: bool | int | float
    meaning: str


class SizeFacts(_Facts):
    """The symbols of one kind, added up."""

    kind: str
    symbols: int
    elements: int
    size_bytes: int


class Contents(_Facts):
    """What `sambasim inspect --json` prints."""

    pef: str
    name: str
    format_version: str
    writer: str
    digest: str
    weights_sha256: str
    file_bytes: int
    device_bytes: int
    batch_size: int
    world_size: int
    data_parallel: bool
    training: bool
    loss: str | None
    graphs: tuple[GraphFacts, ...]
    sizes: tuple[SizeFacts, ...]
    symbols: tuple[SymbolFacts, ...]
    groups: tuple[GroupFacts, ...]
    runtime_arguments: tuple[RuntimeArgumentFacts, ...]
    compile_options: dict[str, JsonValue]
    data_source: dict[str, JsonValue]
    training_defaults: dict[str, JsonValue]
    metadata: dict[str, str]


def contents(path: Path, header: PefHeader, document: PefDocument) -> Contents:
    """The facts about the PEF at `path`, which has this header and document."""
    program = document.program
    return Contents(
        pef=str(path),
        name=program.name,
        format_version=header.version,
        writer=header.writer,
        digest=document.digest,
        weights_sha256=document.weights_sha256,
        file_bytes=path.stat().st_size,
        device_bytes=program.device_bytes,
        batch_size=program.batch_size,
        world_size=program.world_size,
        data_parallel=program.data_parallel is not None,
        training=program.training is not None,
        loss=program.loss,
        graphs=tuple(_graph_facts(program, graph) for graph in program.graphs),
        sizes=tuple(_size_facts(program)),
        symbols=tuple(_symbol_facts(program)),
        groups=tuple(_group_facts(program)),
        runtime_arguments=tuple(
            RuntimeArgumentFacts(name=a.name, default=a.default, meaning=a.meaning) for a in program.runtime_arguments
        ),
        compile_options=dict(document.compile_options),
        data_source=dict(document.data_source),
        training_defaults=dict(document.training_defaults),
        metadata=dict(document.metadata),
    )


def printed_graphs(program: Program) -> str:
    """All graphs of `program` as text."""
    return "\n".join(format_graph(program, graph) for graph in program.graphs)


def _graph_facts(program: Program, graph: Graph) -> GraphFacts:
    traffic = section_traffic(program, graph)
    sections = (
        SectionFacts(
            index=section.index,
            kind=section.kind.value,
            name=section.name,
            operators=section.stop - section.start,
            in_bytes=in_bytes,
            out_bytes=out_bytes,
        )
        for section, (in_bytes, out_bytes) in zip(graph.sections, traffic, strict=True)
    )
    return GraphFacts(
        name=graph.name,
        nodes=len(graph.nodes),
        inputs=graph.inputs,
        outputs=tuple(output.symbol for output in graph.outputs),
        sections=tuple(sections),
        operators=tuple(_operator_facts(graph.nodes)),
    )


def _operator_facts(nodes: Iterable[Node]) -> Iterable[OperatorFacts]:
    """Sorted by kind, then by frequency."""
    counts: dict[str, int] = {}
    sources: dict[str, dict[str, None]] = {}  # a dict keeps the order of first use
    for node in nodes:
        counts[node.operator] = counts.get(node.operator, 0) + 1
        lines = sources.setdefault(node.operator, {})
        if node.source is not None:
            lines[f"{node.source.file}:{node.source.line}"] = None
    kinds = {operator: OPERATORS[operator].kind.value for operator in counts}
    for operator in sorted(counts, key=lambda operator: (kinds[operator], -counts[operator], operator)):
        yield OperatorFacts(
            kind=kinds[operator], operator=operator, count=counts[operator], sources=tuple(sources[operator])
        )


def _size_facts(program: Program) -> Iterable[SizeFacts]:
    for kind in SymbolKind:
        types = [symbol.type for symbol in program.symbols.values() if symbol.kind is kind]
        if types:
            yield SizeFacts(
                kind=kind.value,
                symbols=len(types),
                elements=sum(type_.numel for type_ in types),
                size_bytes=sum(type_.size_bytes for type_ in types),
            )


def _symbol_facts(program: Program) -> Iterable[SymbolFacts]:
    for symbol in program.symbols.values():
        yield SymbolFacts(
            name=symbol.name,
            kind=symbol.kind.value,
            dtype=symbol.type.dtype,
            shape=symbol.type.shape,
            size_bytes=symbol.type.size_bytes,
            offset=symbol.offset,
            torch_names=symbol.torch_names,
        )


def _group_facts(program: Program) -> Iterable[GroupFacts]:
    wrappers = _wrappers(program)
    for group in program.groups:
        yield GroupFacts(
            name=group.name,
            dtype=group.dtype,
            parameters=len(group.members),
            elements=group.numel,
            size_bytes=_group_bytes(group),
            optimizer=program.optimizers[group.optimizer].name,
            gradient_symbol=wrappers.get(group.name),
        )


def _wrappers(program: Program) -> Mapping[str, str]:
    parallel = program.data_parallel
    return {group.group: group.symbol for group in parallel.gradient_groups} if parallel else {}


def _group_bytes(group: ParameterGroup) -> int:
    return group.numel * DTYPE_BYTES[group.dtype]


def section_traffic(program: Program, graph: Graph) -> Sequence[tuple[int, int]]:
    """Bytes in and bytes out of each section of `graph`, in order, for one replica."""
    last_read = {name: place for place, node in enumerate(graph.nodes) for name in node_references(node)}
    # Outputs count as read after the last node.
    last_read |= {output.value: len(graph.nodes) for output in graph.outputs}
    groups = {group.name: group for group in program.groups}

    def size(name: str) -> int:
        type_ = graph.values.get(name) or program.symbols[name].type
        return type_.size_bytes

    traffic: list[tuple[int, int]] = []
    for section in graph.sections:
        nodes = graph.section_nodes(section)
        made = {result for node in nodes for result in node.results if result is not None}
        entering = {name for node in nodes for name in node_references(node)} - made
        leaving = {name for name in made if last_read.get(name, -1) >= section.stop}
        composites = [_composite_bytes(program, node, groups) for node in nodes]
        in_bytes = sum(map(size, entering)) + sum(read for read, _ in composites)
        out_bytes = sum(map(size, leaving)) + sum(written for _, written in composites)
        traffic.append((in_bytes, out_bytes))
    return traffic


def _composite_bytes(program: Program, node: Node, groups: dict[str, ParameterGroup]) -> tuple[int, int]:
    """Bytes that a composite operator reads and writes; 0 and 0 for an ATen operator, whose values count by name."""
    read = written = 0
    if not node.operator.startswith(("comm.", "opt.")):
        return read, written
    for group in _groups_of(node, groups):
        flat_bytes = group.numel * DTYPE_BYTES[group.dtype]
        states = len(program.optimizers[group.optimizer].states)
        if node.operator == "opt.square_sums":
            read += flat_bytes
        elif node.operator in ("comm.reduce_scatter", "comm.all_gather"):
            read += flat_bytes
            written += flat_bytes
        else:
            read += (2 + states) * flat_bytes
            written += (1 + states) * flat_bytes
    return read, written


def _groups_of(node: Node, groups: dict[str, ParameterGroup]) -> Iterator[ParameterGroup]:
    for argument in node.args:
        for name in argument if isinstance(argument, tuple) else (argument,):
            if isinstance(name, str) and name in groups:
                yield groups[name]
