"""What `sambasim inspect` says about a PEF, as JSON. Traffic is the size of what a section reads and writes, each value
counted once."""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue

from sambasim.ir.dataflow import Gather, gathers, section_effects
from sambasim.ir.graph import Graph, Node
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program, RuntimeArgument
from sambasim.ir.ranks import copied, ends_of, kept, of_ranks
from sambasim.ir.types import DTYPE_BYTES, SymbolKind, cut
from sambasim.pef import Checked, PefDocument, PefHeader
from sambasim.report.summaries import held_bytes, parameter_bytes, received_bytes


class _Facts(BaseModel):
    # JSON has no infinity, and "Infinity" is clearer than null.
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


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


class OperatorFacts(_Facts):
    kind: str
    operator: str
    count: int
    sources: tuple[str, ...]


class GatherFacts(_Facts):
    """What a rank gathers along `axis` in a pass, because `operator` reads whole values that are cut; `operator` may be
    `gradients` or `outputs`, which are given out whole."""

    axis: str
    operator: str
    values: int
    received_bytes: int
    modules: tuple[str, ...]


class GraphFacts(_Facts):
    name: str
    nodes: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sections: tuple[SectionFacts, ...]
    operators: tuple[OperatorFacts, ...]
    gathered: tuple[GatherFacts, ...]


class SymbolFacts(_Facts):
    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]
    size_bytes: int
    offset: int | None
    torch_names: tuple[str, ...]


class AxisFacts(_Facts):
    """One mesh axis. `size` is the smallest one if a run chooses it, `chips` the ranks along it that share the batch of
    a replica. `received_bytes` is what a rank receives along it in one pass of the training step, or of the evaluation
    graph without one."""

    name: str
    size: int
    at_run_time: bool
    chips: int
    received_bytes: int


class StageFacts(_Facts):
    """What one rank of a pipeline has. `training_bytes`: its gradients and optimizer states; `sent_bytes`: to other
    ranks, in the forward and backward of one micro-batch; `tied`: by parameter that it updates with the gradient of
    another rank, that rank."""

    rank: int
    stages: tuple[int, ...]
    operators: int
    parameter_bytes: int
    training_bytes: int
    sent_bytes: int
    tied: Mapping[str, int]


class KeptFacts(_Facts):
    """What one of the fewest replicas keeps of one kind between steps, in a host sync, of `size_bytes`."""

    kind: str
    size_bytes: int
    kept_bytes: int


class GroupFacts(_Facts):
    """One parameter group. `gradient_symbol` holds its gradients for data parallelism; None without."""

    name: str
    dtype: str
    parameters: int
    elements: int
    size_bytes: int
    optimizer: str
    gradient_symbol: str | None


class SizeFacts(_Facts):
    kind: str
    symbols: int
    elements: int
    size_bytes: int


class Contents(_Facts):
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
    mesh: tuple[AxisFacts, ...]
    stages: tuple[StageFacts, ...]
    parameter_bytes: int
    data_parallel: bool
    zero: int
    kept: tuple[KeptFacts, ...]
    training: bool
    loss: str | None
    graphs: tuple[GraphFacts, ...]
    sizes: tuple[SizeFacts, ...]
    symbols: tuple[SymbolFacts, ...]
    groups: tuple[GroupFacts, ...]
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
        mesh=tuple(
            AxisFacts(
                name=axis.name,
                size=axis.size,
                at_run_time=axis.at_run_time,
                chips=axis.chips,
                received_bytes=received_bytes(program, axis.name),
            )
            for axis in program.mesh
        ),
        stages=tuple(_stage_facts(program)),
        parameter_bytes=parameter_bytes(program, whole=True),
        data_parallel=program.data_parallel,
        zero=program.zero,
        kept=tuple(
            KeptFacts(kind=one.kind, size_bytes=one.whole_bytes, kept_bytes=one.kept_bytes)
            for one in kept(program, _first_slices(program))
            if program.training is not None
        ),
        training=program.training is not None,
        loss=program.loss,
        graphs=tuple(_graph_facts(program, graph) for graph in program.graphs),
        sizes=tuple(_size_facts(program)),
        symbols=tuple(_symbol_facts(program)),
        groups=tuple(_group_facts(program)),
        runtime_arguments=program.runtime_arguments,
        compile_options=dict(document.compile_options),
        data_source=dict(document.data_source),
        training_defaults=dict(document.training_defaults),
        metadata=dict(document.metadata),
        checked=document.checked,
    )


def _stage_facts(program: Program) -> Iterable[StageFacts]:
    schedule = program.schedule
    for rank, own in enumerate(() if schedule is None else of_ranks(program)):
        graph = own.leading
        types = {name: symbol.type for name, symbol in own.symbols.items()} | dict(graph.values)
        sent = [name for node in graph.nodes if node.operator == "comm.send" for name in node.reads]
        own_of = {member.gradient: member.parameter for group in own.groups for member in group.members}
        held = held_bytes(own)
        yield StageFacts(
            rank=rank,
            stages=tuple(schedule.stages_of(rank)) if schedule is not None else (),
            operators=len(graph.nodes),
            parameter_bytes=held[SymbolKind.PARAMETER],
            training_bytes=held[SymbolKind.GRADIENT] + held[SymbolKind.OPTIMIZER_STATE],
            sent_bytes=sum(types[name].size_bytes for name in sent),
            tied={own_of[name]: ends_of(node)[0] for node in graph.nodes if (name := copied(node)) in own_of},
        )


def _graph_facts(program: Program, graph: Graph) -> GraphFacts:
    return GraphFacts(
        name=graph.name,
        nodes=len(graph.nodes),
        inputs=graph.inputs,
        outputs=tuple(output.symbol for output in graph.outputs),
        sections=tuple(section_facts(program, graph)),
        operators=tuple(_operator_facts(graph.nodes)),
        gathered=tuple(_gather_facts(program, graph)),
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


def _operator_facts(nodes: Iterable[Node]) -> Iterable[OperatorFacts]:
    counts = Counter(node.operator for node in nodes)
    sources: dict[str, dict[str, None]] = {operator: {} for operator in counts}  # a dict keeps the order of first use
    for node in nodes:
        if node.source is not None:
            sources[node.operator][f"{node.source.file}:{node.source.line}"] = None
    kinds = {operator: OPERATORS[operator].kind.value for operator in counts}
    for operator in sorted(counts, key=lambda operator: (kinds[operator], -counts[operator], operator)):
        yield OperatorFacts(
            kind=kinds[operator], operator=operator, count=counts[operator], sources=tuple(sources[operator])
        )


def _gather_facts(program: Program, graph: Graph) -> Iterable[GatherFacts]:
    for axis in program.mesh:
        by_operator: dict[str, list[Gather]] = {}
        for one in gathers(graph, axis.name, axis.size):
            by_operator.setdefault(one.operator, []).append(one)
        for operator, found in by_operator.items():
            yield GatherFacts(
                axis=axis.name,
                operator=operator,
                values=len(found),
                received_bytes=sum(one.received_bytes for one in found),
                modules=tuple(dict.fromkeys(one.module for one in found if one.module)),
            )


def _size_facts(program: Program) -> Iterable[SizeFacts]:
    for kind in SymbolKind:
        types = [symbol.type for symbol in program.symbols.values() if symbol.kind is kind]
        if types:
            elements, size_bytes = sum(one.numel for one in types), sum(one.size_bytes for one in types)
            yield SizeFacts(kind=kind.value, symbols=len(types), elements=elements, size_bytes=size_bytes)


def _symbol_facts(program: Program) -> Iterable[SymbolFacts]:
    for symbol in program.symbols.values():
        yield SymbolFacts(
            name=symbol.name,
            kind=symbol.kind.value,
            dtype=symbol.type.dtype,
            shape=symbol.type.shape,
            whole_shape=symbol.whole.shape,
            size_bytes=symbol.type.size_bytes,
            offset=symbol.offset,
            torch_names=symbol.torch_names,
        )


def _group_facts(program: Program) -> Iterable[GroupFacts]:
    for group in program.groups:
        yield GroupFacts(
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
