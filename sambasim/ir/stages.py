"""The stages of a pipeline: what each rank of the axis pp executes and holds.

A section of a pass has a stage, and stage s is on rank s modulo the size of the axis. What crosses ranks goes by
comm.send and comm.recv nodes. A parameter group is on the rank that completes its gradients, or on the one to which
comm.copy nodes of the update bring them: that of a tied parameter.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from sambasim.errors import InvariantError
from sambasim.ir.dataflow import groups_of, pass_and_update
from sambasim.ir.graph import Graph, Node, Section
from sambasim.ir.mesh import PIPELINE
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind

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
    return _symbols_of(program, _parts(program))


@dataclass(frozen=True, slots=True)
class _Part:
    """The groups of one rank on the axis pp, and its part of each graph."""

    groups: frozenset[str]
    training: Graph | None
    evaluation: Graph
    single: Graph | None


def _parts(program: Program) -> list[_Part]:
    ranks = pipeline_ranks(program)
    if ranks == 1:
        groups = frozenset(group.name for group in program.groups)
        return [_Part(groups, program.training, program.evaluation, program.single)]
    groups_at = ranks_of_groups(program)
    training, single, found = program.training, program.single, []
    for rank in range(ranks):
        own = frozenset(name for name, at in groups_at.items() if at == rank)
        found.append(
            _Part(
                own,
                None if training is None else _own(training, own, rank, ranks),
                _own(program.evaluation, own, rank, ranks),
                None if single is None else _own(single, own, rank, ranks),
            )
        )
    return found


def _symbols_of(program: Program, parts: Sequence[_Part]) -> tuple[frozenset[str], ...]:
    if len(parts) == 1:
        return (frozenset(program.symbols),)
    everywhere = {name for name, symbol in program.symbols.items() if symbol.kind in _EVERYWHERE}
    found = []
    for part in parts:
        names = set(everywhere)
        for graph in filter(None, (part.training, part.evaluation, part.single)):
            names.update(graph.inputs, (output.symbol for output in graph.outputs))
        for group in program.groups:
            if group.name in part.groups:
                for member in group.members:
                    names.update(program.optimizers[group.optimizer].symbols_of(member).values())
        if program.data_parallel is not None:
            names.update(one.symbol for one in program.data_parallel.gradient_groups if one.group in part.groups)
        found.append(names)
    found[0] |= program.symbols.keys() - set().union(*found)
    return tuple(map(frozenset, found))


def first_holders(program: Program) -> Mapping[str, int]:
    """By symbol, the first rank on the axis pp that holds it."""
    of_ranks = symbols_of_ranks(program)
    return {name: rank for rank in reversed(range(len(of_ranks))) for name in of_ranks[rank]}


def of_rank(program: Program, rank: int) -> Program:
    """The program of `rank` on the axis pp: see `of_ranks`."""
    return of_ranks(program)[rank]


def of_ranks(program: Program) -> tuple[Program, ...]:
    """The program of each rank on the axis pp: its sections, its parameter groups, and the symbols that they work
    on."""
    parts = _parts(program)
    if len(parts) == 1:
        return (program,)
    found = []
    for part, symbols in zip(parts, _symbols_of(program, parts), strict=True):
        parallel = program.data_parallel
        if parallel is not None:
            own = tuple(one for one in parallel.gradient_groups if one.group in part.groups)
            parallel = replace(parallel, gradient_groups=own)
        found.append(
            replace(
                program,
                symbols={name: symbol for name, symbol in program.symbols.items() if name in symbols},
                training=part.training,
                evaluation=part.evaluation,
                single=part.single,
                groups=tuple(group for group in program.groups if group.name in part.groups),
                data_parallel=parallel,
            )
        )
    return tuple(found)


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
    outputs = tuple(one for one in graph.outputs if one.value in made)
    read.update(one.value for one in outputs)
    inputs = tuple(name for name in graph.inputs if name in read)
    return replace(graph, inputs=inputs, nodes=tuple(nodes), outputs=outputs, sections=tuple(sections))


def _of_groups(node: Node, own: Set[str], rank: int) -> Node | None:
    """A node of the update, for `rank`, which has the groups `own`; None if it works on others only."""
    if copied(node) is not None:
        return node if rank in ends_of(node) else None
    named = groups_of(node)
    if not named or own >= set(named):
        return node
    if node.operator != "opt.square_sums":
        return None
    return replace(node, args=(tuple(name for name in named if name in own),))
