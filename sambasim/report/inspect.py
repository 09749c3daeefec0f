"""What `sambasim inspect` says about a PEF, as JSON. Traffic is the size of what a section reads and writes, each value
counted once."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, JsonValue

from sambasim.ir.dataflow import Gather, gathers, section_effects
from sambasim.ir.graph import Graph, Node
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program, RuntimeArgument
from sambasim.ir.ranks import Kept, copied, ends_of, kept, of_ranks
from sambasim.ir.types import DTYPE_BYTES, SymbolKind, cut
from sambasim.pef import Checked, PefDocument, PefHeader
from sambasim.report.summaries import held_bytes, parameter_bytes, received_bytes


class _Facts(BaseModel):
    # JSON has no infinity, and "Infinity" is clearer than null.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Row(_Facts):
    """A row of a table. Its columns are attributes, and keys in JSON; the function that makes the rows names them."""

    model_config = ConfigDict(extra="allow")

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class SectionFacts(_Facts):
    """One section: the names of the values, symbols and `group.region` that it reads and writes, and their bytes."""

    index: int
    kind: str
    name: str
    operators: int
    in_bytes: int
    out_bytes: int
    reads: tuple[str, ...]
    writes: tuple[str, ...]


class GraphFacts(_Facts):
    name: str
    nodes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sections: tuple[SectionFacts, ...]
    operators: tuple[Row, ...]
    gathered: tuple[Row, ...]


class Contents(_Facts):
    """`kept` is what one of the fewest replicas keeps between steps, in a host sync."""

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
    mesh: tuple[Row, ...]
    stages: tuple[Row, ...]
    parameter_bytes: int
    data_parallel: bool
    zero: int
    kept: tuple[Kept, ...]
    training: bool
    loss: str | None
    graphs: tuple[GraphFacts, ...]
    sizes: tuple[Row, ...]
    symbols: tuple[Row, ...]
    groups: tuple[Row, ...]
    runtime_arguments: tuple[RuntimeArgument, ...]
    compile_options: dict[str, JsonValue]
    data_source: dict[str, JsonValue]
    training_defaults: dict[str, JsonValue]
    metadata: dict[str, str]
    checked: Checked | None


def contents(path: Path, header: PefHeader, document: PefDocument) -> Contents:
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
        batch_size=program.replica_batch_size,
        world_size=program.world_size,
        mesh=tuple(_axes(program)),
        stages=tuple(_stages(program)),
        parameter_bytes=parameter_bytes(program, whole=True),
        data_parallel=program.data_parallel,
        zero=program.zero,
        kept=tuple(kept(program, _first_slices(program)) if program.training is not None else ()),
        training=program.training is not None,
        loss=program.loss,
        graphs=tuple(_graph_facts(program, graph) for graph in program.graphs),
        sizes=tuple(_sizes(program)),
        symbols=tuple(_symbols(program)),
        groups=tuple(_groups(program)),
        runtime_arguments=program.runtime_arguments,
        compile_options=dict(document.compile_options),
        data_source=dict(document.data_source),
        training_defaults=dict(document.training_defaults),
        metadata=dict(document.metadata),
        checked=document.checked,
    )


def _axes(program: Program) -> Iterable[Row]:
    """`size` is the smallest one if a run chooses it, `chips` the ranks along the axis that share the batch of a
    replica, and `received_bytes` what a rank receives along it in one pass of the training step, or of the evaluation
    graph without one."""
    for axis in program.mesh:
        yield Row(
            name=axis.name,
            size=axis.size,
            at_run_time=axis.at_run_time,
            chips=axis.chips,
            received_bytes=received_bytes(program, axis.name),
        )


def _stages(program: Program) -> Iterable[Row]:
    """What each rank of a pipeline has. `training_bytes`: its gradients and optimizer states; `sent_bytes`: to other
    ranks, in the forward and backward of one micro-batch; `tied`: by parameter that it updates with the gradient of
    another rank, that rank."""
    schedule = program.schedule
    for rank, part in enumerate(() if schedule is None else of_ranks(program)):
        graph = part.leading
        types = {name: symbol.type for name, symbol in part.symbols.items()} | dict(graph.values)
        sent = [name for node in graph.nodes if node.operator == "comm.send" for name in node.reads]
        parameter_of = {member.gradient: member.parameter for group in part.groups for member in group.members}
        copies = {copied(node): node for node in graph.nodes}
        held = held_bytes(part)
        yield Row(
            rank=rank,
            stages=list(schedule.stages_of(rank)) if schedule is not None else [],
            operators=len(graph.nodes),
            parameter_bytes=held[SymbolKind.PARAMETER],
            training_bytes=held[SymbolKind.GRADIENT] + held[SymbolKind.OPTIMIZER_STATE],
            sent_bytes=sum(types[name].size_bytes for name in sent),
            tied={parameter_of[name]: ends_of(node)[0] for name, node in copies.items() if name in parameter_of},
        )


def _graph_facts(program: Program, graph: Graph) -> GraphFacts:
    return GraphFacts(
        name=graph.name,
        nodes=len(graph.nodes),
        inputs=graph.inputs,
        outputs=tuple(output.symbol for output in graph.outputs),
        sections=tuple(section_facts(program, graph)),
        operators=tuple(_operators(graph.nodes)),
        gathered=tuple(_gathered(program, graph)),
    )


def section_facts(program: Program, graph: Graph) -> Iterable[SectionFacts]:
    types = {name: symbol.type for name, symbol in program.symbols.items()} | dict(graph.values)
    for group in program.groups:
        types |= {f"{group.name}.{region}": group.region_type(region) for region in group.regions}

    def size_bytes(names: Iterable[str]) -> int:
        return sum(types[name].size_bytes for name in names)

    for section in graph.sections:
        effects = section_effects(program, graph, section)
        yield SectionFacts(
            index=section.index,
            kind=section.kind.value,
            name=section.name,
            operators=section.stop - section.start,
            in_bytes=size_bytes(effects.reads),
            out_bytes=size_bytes(effects.writes),
            reads=tuple(sorted(effects.reads)),
            writes=tuple(sorted(effects.writes)),
        )


def _operators(nodes: Iterable[Node]) -> Iterable[Row]:
    """How often each stands in a graph, and its source lines in the order of first use."""
    counts = Counter(node.operator for node in nodes)
    sources: dict[str, dict[str, None]] = {operator: {} for operator in counts}
    for node in nodes:
        if node.source is not None:
            sources[node.operator][f"{node.source.file}:{node.source.line}"] = None
    kinds = {operator: OPERATORS[operator].kind.value for operator in counts}
    for operator in sorted(counts, key=lambda operator: (kinds[operator], -counts[operator], operator)):
        yield Row(kind=kinds[operator], operator=operator, count=counts[operator], sources=list(sources[operator]))


def _gathered(program: Program, graph: Graph) -> Iterable[Row]:
    """What a rank gathers along an axis in a pass, because an operator reads whole values that are cut; `operator` may
    be `gradients` or `outputs`, which are given out whole."""
    for axis in program.mesh:
        by_operator: dict[str, list[Gather]] = {}
        for gather in gathers(graph, axis.name, axis.size):
            by_operator.setdefault(gather.operator, []).append(gather)
        for operator, values in by_operator.items():
            yield Row(
                axis=axis.name,
                operator=operator,
                values=len(values),
                received_bytes=sum(value.received_bytes for value in values),
                modules=list(dict.fromkeys(value.module for value in values if value.module)),
            )


def _sizes(program: Program) -> Iterable[Row]:
    for kind in SymbolKind:
        types = [symbol.type for symbol in program.symbols.values() if symbol.kind is kind]
        if types:
            elements, size_bytes = sum(type_.numel for type_ in types), sum(type_.size_bytes for type_ in types)
            yield Row(kind=kind.value, symbols=len(types), elements=elements, size_bytes=size_bytes)


def _symbols(program: Program) -> Iterable[Row]:
    for symbol in program.symbols.values():
        yield Row(
            name=symbol.name,
            kind=symbol.kind.value,
            dtype=symbol.type.dtype,
            shape=list(symbol.type.shape),
            whole_shape=list(symbol.whole.shape),
            size_bytes=symbol.type.size_bytes,
            offset=symbol.offset,
            torch_names=list(symbol.torch_names),
        )


def _groups(program: Program) -> Iterable[Row]:
    """The parameter groups. `gradient_symbol` holds their gradients for data parallelism; None without."""
    for group in program.groups:
        yield Row(
            name=group.name,
            dtype=group.dtype,
            parameters=len(group.members),
            elements=group.numel,
            size_bytes=group.numel * DTYPE_BYTES[group.dtype],
            optimizer=program.optimizers[group.optimizer].name,
            gradient_symbol=group.wrapper,
        )


def _first_slices(program: Program) -> Mapping[str, tuple[int, int]]:
    """By group, the slice of the first of the fewest replicas; a run whose gradients are clipped cuts at blocks."""
    replicas = program.world_size * program.chips
    return {group.name: cut(group.numel, replicas)[0] for group in program.groups}
