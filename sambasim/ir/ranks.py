"""Programs derived from a program: that of one rank, with its stage of a pipeline and its slices by ZeRO (Rajbhandari
et al., SC 2020); a replica of several ranks as one; and inference, which needs no labels.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial

from sambasim.errors import OptionError
from sambasim.ir.dataflow import groups_of, has_effect, needed_for, number_of, pass_and_update, readiness
from sambasim.ir.graph import Graph, Node, Section, with_sections
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, copy_mesh
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import Program
from sambasim.ir.types import DTYPE_BYTES, Cut, SymbolKind, parameter_of

_OF_A_BATCH = (SymbolKind.INPUT, SymbolKind.TANGENT, SymbolKind.OUTPUT)


def ranks_of_groups(program: Program) -> Mapping[str, int]:
    """The rank on the axis pp of each parameter group, by name."""
    rank_of = {gradient: rank for gradient, (rank, _) in holders_of_gradients(program).items()}
    nodes = program.training.nodes if program.training else ()
    rank_of |= {symbol: ends_of(node)[1] for node in nodes if (symbol := copied(node)) in rank_of}
    return {group.name: rank_of.get(group.members[0].gradient, 0) for group in program.groups}


def holders_of_gradients(program: Program) -> Mapping[str, tuple[int, set[int]]]:
    """By gradient: the rank on the axis pp that completes it, and the others that read its parameter."""
    training, ranks = program.training, copy_mesh(program.mesh).size(PIPELINE)
    if training is None or ranks == 1:
        return {}
    made: dict[str, int] = {}
    readers: dict[str, set[int]] = defaultdict(set)  # in any graph
    for graph in program.graphs:
        for section, node in graph.nodes_in(pass_and_update(graph)[0]):
            made |= dict.fromkeys(node.makes if graph is training else (), section.stage % ranks)
            for name in node.reads:
                readers[name].add(section.stage % ranks)
    kept = {output.symbol: made.get(output.value, 0) for output in training.outputs}
    gradients = [name for name in kept if program.symbols[name].kind is SymbolKind.GRADIENT]
    return {name: (kept[name], readers[parameter_of(name)] - {kept[name]}) for name in gradients}


def copied(node: Node) -> str | None:
    """The symbol that `node` copies to another rank."""
    return str(node.args[1]) if node.operator == "comm.copy" else None


def ends_of(node: Node) -> tuple[int, int]:
    """The source and the target of a comm.copy node. Raises InvariantError if it has none."""
    return number_of(node, "source"), number_of(node, "target")


def first_holders(program: Program) -> Mapping[str, int]:
    """By symbol, the first rank on the axis pp that holds it."""
    return {name: rank for rank, part in reversed([*enumerate(of_ranks(program))]) for name in part.symbols}


def of_ranks(program: Program) -> tuple[Program, ...]:
    """The program of each rank on the axis pp: its sections, its groups, and the symbols that they work on. Symbols
    that no rank works on are the first one's."""
    ranks = copy_mesh(program.mesh).size(PIPELINE)
    if ranks == 1:
        return (program,)
    everywhere = program.names_of(*_OF_A_BATCH, SymbolKind.ARGUMENT, SymbolKind.REDUCE_BUFFER)
    rank_of, parts, held = ranks_of_groups(program), [], []
    for rank in range(ranks):
        groups = tuple(group for group in program.groups if rank_of[group.name] == rank)
        own = partial(_own, groups={group.name for group in groups}, rank=rank, ranks=ranks)
        parts.append(replace(program.map_graphs(own), groups=groups))
        held.append(set(everywhere))
        for graph in parts[-1].graphs:
            held[-1].update(graph.inputs, (output.symbol for output in graph.outputs))
        for group in groups:
            held[-1].update(program.symbols_of(group), filter(None, [group.wrapper]))
        held[-1].update(average for name, average in program.buffer_averages.items() if name in held[-1])
    held[0] |= program.symbols.keys() - set().union(*held)
    symbols = [{name: symbol for name, symbol in program.symbols.items() if name in names} for names in held]
    return tuple(replace(part, symbols=of_part) for part, of_part in zip(parts, symbols, strict=True))


def _own(graph: Graph, groups: Set[str], rank: int, ranks: int) -> Graph:
    """The sections and nodes of one rank, which has `groups`."""
    in_pass, update = pass_and_update(graph)
    of_pass = [(section, graph.section_nodes(section)) for section in in_pass if section.stage % ranks == rank]
    of_update = [(section, _of_groups(graph.section_nodes(section), groups, rank)) for section in update]
    own = with_sections(graph, [*of_pass, *of_update])
    made = {result for node in own.nodes for result in node.results}
    made.update(graph.inputs if rank == ranks - 1 else ())
    outputs = tuple(output for output in graph.outputs if output.value in made)
    read = {name for node in own.nodes for name in node.reads} | {output.value for output in outputs}
    return replace(own, inputs=tuple(name for name in graph.inputs if name in read), outputs=outputs)


def _of_groups(nodes: Iterable[Node], groups: Set[str], rank: int) -> Iterator[Node]:
    """Of nodes of the update, those that `rank`, which has `groups`, runs."""
    for node in nodes:
        named = groups_of(node)
        runs = groups >= set(named) if copied(node) is None else rank in ends_of(node)
        if runs:
            yield node
        elif node.operator == "opt.square_sums":
            yield replace(node, args=(tuple(name for name in named if name in groups),))


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
    sections, _ = pass_and_update(training)
    before: list[list[Node]] = [[] for _ in sections]
    behind: list[list[Node]] = [[] for _ in sections]
    moved: set[Node] = set()  # from the update into the pass
    ready = readiness(program)

    def release(group: str, region: str, position: int) -> Node:
        return Node(f"{group}__release_{region}_{position}", _RELEASE, (group, region))

    for node in training.nodes[sections[-1].stop :]:
        if node.operator == "comm.reduce_scatter":
            (name,) = groups_of(node)
            complete = ready[name].reduce
            if complete <= len(sections):
                behind[complete - 1] += [node, release(name, "gradient", complete)]
                moved.add(node)
        elif node.operator == "comm.all_gather" and program.zero == 3 and groups_of(node):
            moved.add(node)
    for group in program.groups if program.zero == 3 else ():
        read = ready[group.name].readers
        for first, last in _spans(read, sections, program):
            gather = f"{group.name}__gather_{first}"
            before[first].append(Node(gather, "comm.all_gather", (group.name,), (("axis", DATA_PARALLEL),)))
            if read[-1] < len(sections):  # not if an output of the pass shares its memory
                behind[last].append(release(group.name, "parameter", last))
    own = [training.section_nodes(section) for section in training.sections]
    in_pass = [(*first, *nodes, *last) for first, nodes, last in zip(before, own, behind, strict=False)]
    left = [[node for node in nodes if node not in moved] for nodes in own[len(sections) :]]
    parts = zip(training.sections, [*in_pass, *left], strict=True)
    return replace(program, training=with_sections(training, parts))


def _spans(read: Sequence[int], sections: Sequence[Section], program: Program) -> list[tuple[int, int]]:
    """The first and last sections of the runs for which parameters that `read` read are kept whole: as long as the next
    section of the same action reads them."""
    action = [(section.stage, section.kind, section.weights_only) for section in sections]
    spans: list[tuple[int, int]] = []
    for at in read:
        if at == len(sections):
            continue
        if spans and spans[-1][1] == at - 1 and (program.schedule is None or action[at - 1] == action[at]):
            spans[-1] = spans[-1][0], at
        else:
            spans.append((at, at))
    return spans


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes that a program has of one kind, and those of them that one replica keeps between steps."""

    kind: str
    size_bytes: int
    kept_bytes: int


def kept(program: Program, owned: Mapping[str, tuple[int, int]]) -> Sequence[Kept]:
    """What a replica that owns these slices of groups keeps of parameters, gradients and optimizer states."""
    every = []
    for kind, level in (("parameters", 3), ("gradients", 2), ("states", 1)):
        whole_bytes = own_bytes = 0
        for group in program.groups:
            start, stop = owned[group.name] if program.zero >= level else (0, group.numel)
            for region in program.optimizers[group.optimizer].states if kind == "states" else (kind[:-1],):
                size_bytes = DTYPE_BYTES[group.region_type(region).dtype]
                whole_bytes += group.numel * size_bytes
                own_bytes += (stop - start) * size_bytes
        every.append(Kept(kind, whole_bytes, own_bytes))
    return every


def without_loss(program: Program) -> Program:
    """`program` for inference without its loss, and without the inputs that only the loss reads. Assertions and random
    draws stay, but for assertions on those inputs. A program that gives only its loss, or draws random numbers for
    them, is returned as it is."""
    whole, first, logged = program.evaluation, program.loss_outputs, program.evaluated.values()
    outputs = tuple(one for at, one in enumerate(whole.outputs) if at >= first and at not in logged)
    if program.loss is None or not outputs:
        return program
    wanted = {output.value for output in outputs}
    _, read = needed_for(wanted, whole.nodes, ())
    effects = _effects(whole.nodes, [name for name in whole.inputs if name not in read])
    if effects is None:
        return program
    nodes, read = needed_for(wanted, whole.nodes, effects)
    kept = {node.name for node in nodes}
    left = [[node for node in whole.section_nodes(one) if node.name in kept] for one in whole.sections]
    symbols = {name: one for name, one in program.symbols.items() if one.kind is not SymbolKind.INPUT or name in read}
    inputs = tuple(name for name in whole.inputs if name in symbols)
    evaluation = replace(with_sections(whole, zip(whole.sections, left, strict=True)), inputs=inputs, outputs=outputs)
    # The training graph stays: a pipeline's ranks hold what it says.
    program = replace(program, symbols=symbols, evaluation=evaluation, single=None, per_sample_loss=False)
    return replace(program, loss=None, count=None, logged={}, evaluated={})


def _effects(nodes: Sequence[Node], left_out: Sequence[str]) -> set[str] | None:
    """The names of the nodes that check or draw something, without checks that depend on the inputs `left_out`. None if
    a draw depends on them: without it, later draws would be others."""
    depends, effects = set[str | None](left_out), set[str]()
    for node in nodes:
        if not depends.isdisjoint(node.reads):
            depends.update(node.results)
            if OPERATORS[node.operator].draws_random_numbers:
                return None
        elif has_effect(node):
            effects.add(node.name)
    return effects


def with_cut_batch(program: Program, chips: int) -> Program:
    """`program`, compiled for one of `chips` that share the batch of a replica: its inputs, tangents and outputs are
    cut over the chips, by samples, and its axis dp counts replicas. Other outputs are losses, of which a replica has
    the mean. Raises OptionError for an output that is neither."""
    if chips == 1:
        return program
    symbols = dict(program.symbols)
    at_batch_1 = {output.symbol for output in program.single.outputs} if program.single else ()
    for name, symbol in program.symbols.items():
        if symbol.kind not in _OF_A_BATCH or name in at_batch_1:
            continue
        if symbol.type.shape and symbol.type.shape[0] % program.batch_size == 0:
            symbols[name] = replace(symbol, cuts=(Cut(DATA_PARALLEL, 0, chips),))
        elif symbol.kind is SymbolKind.OUTPUT and not (symbol.type.numel == 1 and "float" in symbol.type.dtype):
            has = f"neither the {program.batch_size} samples of a chip along its first dimension, nor is it a loss"
            what = f"the output {name}, {symbol.type}, cannot be joined over the chips of a replica: it has {has}"
            remedy = "return a value for each sample, or compile without --tensor-parallel batch"
            raise OptionError(what, remedy=remedy)
    mesh = tuple(replace(axis, size=axis.size // axis.chips, chips=1) for axis in program.mesh)
    return replace(program, symbols=symbols, mesh=mesh)


def as_one_rank(program: Program) -> Program:
    """`program` with the types and the batch size that a replica of one rank would have. Not to be executed."""
    whole = with_cut_batch(program, program.chips).symbols.items()
    symbols = {name: replace(symbol, type=symbol.whole, cuts=()) for name, symbol in whole}
    along_dp = [axis for axis in program.mesh if axis.name == DATA_PARALLEL and axis.at_run_time]
    return replace(
        program,
        batch_size=program.batch_size * program.chips,
        symbols=symbols,
        mesh=tuple(replace(axis, size=axis.size // axis.chips, chips=1) for axis in along_dp),
        reduce_buffer=program.reduce_buffer if along_dp else None,
        zero=program.zero if along_dp else 0,
    )
