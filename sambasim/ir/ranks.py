"""What one rank executes and holds: its stage of a pipeline, and its slices, by ZeRO (Rajbhandari et al., SC 2020).

A section of a pass has a stage, and stage s is on rank s modulo the size of the axis pp. What crosses ranks goes by
comm.send and comm.recv nodes. A parameter group is on the rank that completes its gradients, or on the one to which
comm.copy nodes of the update bring them: that of a tied parameter.

    ZeRO   each rank keeps its slice of             whole only while
    1      optimizer states
    2      and gradients                            the backward computes them
    3      and parameters                           a section reads them

A compiled program has the nodes of ZeRO 1. Transports without shared device memory run `in_slices` of it. There, a
group's reduce_scatter follows the section that completes its gradients, all_gather comes before a section that reads
its parameters, and `memory.release` frees all but the own slice.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from sambasim.errors import InvariantError
from sambasim.ir.dataflow import groups_of, pass_and_update, readers, readiness
from sambasim.ir.graph import Graph, Node, Section
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE
from sambasim.ir.program import Program
from sambasim.ir.types import DTYPE_BYTES, SymbolKind

_EVERYWHERE = (SymbolKind.INPUT, SymbolKind.OUTPUT, SymbolKind.TANGENT, SymbolKind.REDUCE_BUFFER)


def pipeline_ranks(program: Program) -> int:
    """The size of the axis pp: 1 for a program without stages."""
    return next((axis.size for axis in program.mesh if axis.name == PIPELINE), 1)


def ranks_of_groups(program: Program) -> Mapping[str, int]:
    """The rank on the axis pp of each parameter group, by name."""
    training, ranks = program.training, pipeline_ranks(program)
    if training is None or ranks == 1:
        return {group.name: 0 for group in program.groups}
    made, _ = ranks_of_values(training, ranks)
    rank_of = {output.symbol: made.get(output.value, 0) for output in training.outputs}
    rank_of |= {symbol: ends_of(node)[1] for node in training.nodes if (symbol := copied(node)) in rank_of}
    return {group.name: rank_of[group.members[0].gradient] for group in program.groups}


def ranks_of_values(training: Graph, ranks: int) -> tuple[Mapping[str, int], Mapping[str, set[int]]]:
    """The rank that makes each value in a pass, and the ranks that read each value or symbol."""
    made: dict[str, int] = {}
    read: dict[str, set[int]] = defaultdict(set)
    for section in pass_and_update(training)[0]:
        for node in training.section_nodes(section):
            made.update((name, section.stage % ranks) for name in node.results if name is not None)
            for name in node.reads:
                read[name].add(section.stage % ranks)
    return made, read


def copied(node: Node) -> str | None:
    """The symbol that `node` copies to another rank."""
    return str(node.args[1]) if node.operator == "comm.copy" else None


def ends_of(node: Node) -> tuple[int, int]:
    """The source and the target of a comm.copy node. Raises InvariantError if it has none."""
    given = dict(node.kwargs)
    source, target = given.get("source"), given.get("target")
    if type(source) is not int or type(target) is not int:
        raise InvariantError(16, f"{node.name} copies from rank {source!r} to rank {target!r}")
    return source, target


def symbols_of_ranks(program: Program) -> tuple[frozenset[str], ...]:
    """By rank on the axis pp: the symbols that it holds. What no rank works on is on the first."""
    return tuple(frozenset(part.symbols) for part in of_ranks(program))


def first_holders(program: Program) -> Mapping[str, int]:
    """By symbol, the first rank on the axis pp that holds it."""
    of_ranks = symbols_of_ranks(program)
    return {name: rank for rank in reversed(range(len(of_ranks))) for name in of_ranks[rank]}


def of_ranks(program: Program) -> tuple[Program, ...]:
    """The program of each rank on the axis pp: its sections, its parameter groups, and the symbols that they work
    on."""
    ranks = pipeline_ranks(program)
    if ranks == 1:
        return (program,)
    rank_of, parts = ranks_of_groups(program), []
    for rank in range(ranks):
        groups = tuple(group for group in program.groups if rank_of[group.name] == rank)
        own = partial(_own, groups={group.name for group in groups}, rank=rank, ranks=ranks)
        parts.append(replace(program.map_graphs(own), groups=groups))
    held = [_symbols_of(part) for part in parts]
    held[0] |= program.symbols.keys() - set().union(*held)
    return tuple(
        replace(part, symbols={name: symbol for name, symbol in program.symbols.items() if name in names})
        for part, names in zip(parts, held, strict=True)
    )


def _symbols_of(part: Program) -> set[str]:
    """The symbols that a rank works on."""
    names = {name for name, symbol in part.symbols.items() if symbol.kind in _EVERYWHERE}
    for graph in part.graphs:
        names.update(graph.inputs, (output.symbol for output in graph.outputs))
    for group in part.groups:
        names.update(part.symbols_of(group), filter(None, [group.wrapper]))
    return names


def _own(graph: Graph, groups: Set[str], rank: int, ranks: int) -> Graph:
    """The sections and nodes of one rank, which has `groups`."""
    in_pass = len(pass_and_update(graph)[0])
    nodes: list[Node] = []
    sections: list[Section] = []
    for number, section in enumerate(graph.sections):
        start = len(nodes)
        if number < in_pass:
            nodes += graph.section_nodes(section) if section.stage % ranks == rank else ()
        else:
            nodes += filter(None, (_of_groups(node, groups, rank) for node in graph.section_nodes(section)))
        if len(nodes) > start:
            sections.append(replace(section, index=len(sections), start=start, stop=len(nodes)))
    made = {result for node in nodes for result in node.results}
    read = {name for node in nodes for name in node.reads}
    made.update(graph.inputs if rank == ranks - 1 else ())
    outputs = tuple(output for output in graph.outputs if output.value in made)
    read.update(output.value for output in outputs)
    inputs = tuple(name for name in graph.inputs if name in read)
    return replace(graph, inputs=inputs, nodes=tuple(nodes), outputs=outputs, sections=tuple(sections))


def _of_groups(node: Node, groups: Set[str], rank: int) -> Node | None:
    """A node of the update, for `rank`, which has `groups`; None if it works on others only."""
    if copied(node) is not None:
        return node if rank in ends_of(node) else None
    named = groups_of(node)
    if not named or groups >= set(named):
        return node
    if node.operator != "opt.square_sums":
        return None
    return replace(node, args=(tuple(name for name in named if name in groups),))


_RELEASE = "memory.release"


def ends_step(node: Node) -> bool:
    """Whether a node of a pass runs in the last pass of a step only, because earlier ones add to the gradients."""
    of_gradients = node.operator == "comm.reduce_scatter" or (node.operator == _RELEASE and node.args[1] == "gradient")
    return of_gradients and bool(groups_of(node))


def in_slices(program: Program) -> Program:
    """`program`, with what `zero` says kept in slices only. Of ZeRO 0 or 1 it is the same."""
    training = program.training
    if training is None or program.zero < 2:
        return program
    sections, update = pass_and_update(training)
    before: list[list[Node]] = [[] for _ in sections]
    behind: list[list[Node]] = [[] for _ in sections]
    reduced: set[str] = set()
    ready, read = readiness(program), readers(program)
    for node in training.nodes[sections[-1].stop :]:
        if node.operator == "comm.reduce_scatter":
            (name,) = groups_of(node)
            complete = ready[name].reduce
            if complete <= len(sections):
                behind[complete - 1] += [node, _release(name, "gradient", complete)]
                reduced.add(name)
    if program.zero == 3:
        for group in program.groups:
            for first, last in _spans(read[group.name], sections, program):
                gather = f"{group.name}__gather_{first}"
                before[first].append(Node(gather, "comm.all_gather", (group.name,), (("axis", DATA_PARALLEL),)))
                if read[group.name][-1] < len(sections):  # not if an output of the pass shares its memory
                    behind[last].append(_release(group.name, "parameter", last))

    nodes: list[Node] = []
    kept: list[Section] = []

    def add(section: Section, members: Sequence[Node]) -> None:
        if members:
            start = len(nodes)
            nodes.extend(members)
            kept.append(replace(section, index=len(kept), start=start, stop=len(nodes)))

    for section, first_nodes, last_nodes in zip(sections, before, behind, strict=True):
        add(section, [*first_nodes, *training.section_nodes(section), *last_nodes])
    for section in update:
        add(section, [node for node in training.section_nodes(section) if not _replaced(node, program, reduced)])
    return replace(program, training=_with(training, nodes, kept))


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that a program has of one kind, and those of them that one replica keeps between steps."""

    kind: str
    size_bytes: int
    kept_bytes: int


def kept(program: Program, owned: Mapping[str, tuple[int, int]]) -> Sequence[Kept]:
    """What a replica that owns these slices of groups keeps of parameters, gradients and optimizer states."""
    found = []
    for kind, level in (("parameters", 3), ("gradients", 2), ("states", 1)):
        whole_bytes = own_bytes = 0
        for group in program.groups:
            start, stop = owned[group.name] if program.zero >= level else (0, group.numel)
            for region in program.optimizers[group.optimizer].states if kind == "states" else (kind[:-1],):
                size_bytes = DTYPE_BYTES[group.region_type(region).dtype]
                whole_bytes += group.numel * size_bytes
                own_bytes += (stop - start) * size_bytes
        found.append(Kept(kind, whole_bytes, own_bytes))
    return found


def _with(training: Graph, nodes: Sequence[Node], sections: Sequence[Section]) -> Graph:
    return replace(training, nodes=tuple(nodes), sections=tuple(sections))


def _release(group: str, region: str, position: int) -> Node:
    return Node(f"{group}__release_{region}_{position}", _RELEASE, (group, region))


def _replaced(node: Node, program: Program, reduced: set[str]) -> bool:
    """Whether a node of the update is in the pass now."""
    if not groups_of(node):
        return False
    if node.operator == "comm.reduce_scatter":
        return reduced.issuperset(groups_of(node))
    return node.operator == "comm.all_gather" and program.zero == 3


def _spans(read: Sequence[int], sections: Sequence[Section], program: Program) -> list[tuple[int, int]]:
    """The first and last sections of the runs for which parameters that the sections `read` read are kept whole: also
    where the next section reads them again, unless that is another action of a pipeline's schedule."""
    spans: list[tuple[int, int]] = []
    for at in read:
        if at == len(sections):
            continue
        if spans and at - spans[-1][1] == 1 and (program.schedule is None or _alike(sections[at - 1], sections[at])):
            spans[-1] = spans[-1][0], at
        else:
            spans.append((at, at))
    return spans


def _alike(before: Section, other: Section) -> bool:
    """Whether the same action of a schedule runs both sections."""
    return (before.stage, before.kind, before.weights_only) == (other.stage, other.kind, other.weights_only)
