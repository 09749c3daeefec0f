"""What sections read and write, and when: derived from the graph, once, for whoever orders or overlaps work.

A node reads and writes values by name. Some nodes also work on the flat tensors of parameter groups in device memory:

    comm.reduce_scatter(group)   reads and writes gradients
    opt.square_sums(groups)      reads gradients
    opt.<kind>(group)            reads gradients; reads and writes parameters and optimizer states
    comm.all_gather(group)       reads and writes parameters
    comm.copy(group, symbol)     reads and writes gradients or parameters, whichever the symbol is
    memory.release(group, what)  writes gradients or parameters

A step runs the sections of a *pass*, forward and backward, once for each micro-step. The sections behind it, the
*update*, run once.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sambasim.ir.graph import Graph, Node, Section, SectionKind
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.schedule import ActionKind
from sambasim.ir.types import SymbolKind

_NOTHING: frozenset[str] = frozenset()


def groups_of(node: Node) -> tuple[str, ...]:
    """The parameter groups that `node` works on, by name; none for an ATen operator, or for communication of values."""
    if node.operator.startswith("aten.") or not node.args:
        return ()
    first = node.args[0]
    names = first if isinstance(first, tuple) else (first,)
    return tuple(name for name in names if isinstance(name, str))


def axis_of(node: Node) -> str | None:
    """The mesh axis along which `node` communicates; None for a node that does not."""
    axis = dict(node.kwargs).get("axis") if node.operator.startswith("comm.") else None
    return axis if isinstance(axis, str) else None


@dataclass(frozen=True, slots=True)
class Gather:
    """The parts of one value that ranks gather in a pass, because an operator of `module` reads it whole, or because it
    is a gradient or an output that is given out whole. A rank receives `received_bytes`."""

    operator: str
    module: str
    received_bytes: int


def gathers(graph: Graph, axis: str, ranks: int) -> Sequence[Gather]:
    """What is gathered along `axis`, in the order of execution."""
    readers: dict[str, Node] = {}
    for node in reversed(graph.nodes):  # so that the first reader stays
        readers |= dict.fromkeys(node.reads, node)

    def found(node: Node) -> Gather:
        name = node.results[0] or ""
        size_bytes = graph.values[name].size_bytes // ranks * (ranks - 1)
        reader = readers.get(name)
        while reader is not None and reader.operator == "comm.shard":
            reader = readers.get(reader.results[0] or "")
        if reader is None:
            return Gather("gradients" if graph.name == "training" else "outputs", "", size_bytes)
        return Gather(reader.operator, reader.module, size_bytes)

    gathering = [node for node in graph.nodes if node.operator == "comm.all_gather" and axis_of(node) == axis]
    return [found(node) for node in gathering if not groups_of(node)]


@dataclass(frozen=True, slots=True)
class Effects:
    """Names of values and symbols, and regions of groups, such as "group0.gradient"."""

    reads: frozenset[str]
    writes: frozenset[str]


def section_effects(program: Program, graph: Graph, section: Section) -> Effects:
    """What a section reads of others, and what it writes for them."""
    nodes = graph.section_nodes(section)
    made = {name for node in nodes for name in node.results if name is not None}
    read = {name for node in nodes for name in node.reads} - made
    read_later = {name for node in graph.nodes[section.stop :] for name in node.reads}
    kept = {output.value: output.symbol for output in graph.outputs}
    written = {kept.get(name, name) for name in made if name in kept or name in read_later}
    groups = {group.name: group for group in program.groups}
    for node in nodes:
        for name in groups_of(node):
            reads, writes = _regions(node, groups[name], program)
            read |= {f"{name}.{region}" for region in reads}
            written |= {f"{name}.{region}" for region in writes}
    return Effects(frozenset(read), frozenset(written))


def _regions(node: Node, group: ParameterGroup, program: Program) -> tuple[tuple[str, ...], tuple[str, ...]]:
    match node.operator:
        case "comm.reduce_scatter":
            return ("gradient",), ("gradient",)
        case "comm.all_gather":
            return ("parameter",), ("parameter",)
        case "memory.release":
            return (), (str(node.args[1]),)
        case "comm.copy":
            of_gradients = program.symbols[str(node.args[1])].kind is SymbolKind.GRADIENT
            region = "gradient" if of_gradients else "parameter"
            return (region,), (region,)
        case "opt.square_sums":
            return ("gradient",), ()
    changed = ("parameter", *program.optimizers[group.optimizer].states)
    return ("gradient", *changed), changed


def pass_and_update(graph: Graph) -> tuple[tuple[Section, ...], tuple[Section, ...]]:
    """The sections that run in every micro-step, and those that run once, when all micro-steps have."""
    behind = 0
    for position, section in enumerate(graph.sections, start=1):
        if section.kind in (SectionKind.FWD, SectionKind.BCKWD):
            behind = position
    return graph.sections[:behind], graph.sections[behind:]


def spans_of_actions(sections: Sequence[Section]) -> Mapping[tuple[ActionKind, int], tuple[int, int]]:
    """The range of sections that each kind of action runs, by stage; an empty one where there are none."""
    found: dict[tuple[ActionKind, int], tuple[int, int]] = defaultdict(lambda: (0, 0))

    def add(kind: ActionKind, section: Section) -> None:
        start, _ = found.get((kind, section.stage), (section.index, section.index))
        found[kind, section.stage] = start, section.index + 1

    for section in sections:
        if section.kind is SectionKind.FWD:
            add(ActionKind.FORWARD, section)
        else:
            add(ActionKind.BACKWARD, section)
            add(ActionKind.WEIGHT_GRADIENTS if section.weights_only else ActionKind.INPUT_GRADIENTS, section)
    return found


def is_clipped(program: Program) -> bool:
    nodes = program.training.nodes if program.training else ()
    return any(node.operator == "opt.square_sums" for node in nodes)


@dataclass(frozen=True, slots=True)
class Readiness:
    """After how many sections of a pass the gradients of a group are complete (`reduce`), and no section that is left
    reads its parameters (`update`)."""

    reduce: int
    update: int


def readiness(program: Program) -> Mapping[str, Readiness]:
    """For each group, by name. One more than a pass has sections means: when the whole pass has ended."""
    training = program.training
    if training is None:
        return {group.name: Readiness(1, 1) for group in program.groups}
    sections, _ = pass_and_update(training)
    made, read = _made_and_read(training, sections, program)
    end = len(sections) + 1
    found = {}
    for group in program.groups:
        names = {member.gradient for member in group.members}
        values = [output.value for output in training.outputs if output.symbol in names]
        complete = max((made.get(value, end) for value in values), default=end)
        unread = max((read[member.parameter][-1] for member in group.members if member.parameter in read), default=0)
        found[group.name] = Readiness(reduce=complete, update=max(complete, unread))
    return found


def readers(program: Program) -> Mapping[str, Sequence[int]]:
    """For each group, by name: the positions of the sections of a pass that read its parameters, ascending. The number
    of sections stands for what is read after the pass."""
    training = program.training
    if training is None:
        return {group.name: () for group in program.groups}
    _, read = _made_and_read(training, pass_and_update(training)[0], program)
    return {
        group.name: sorted({at - 1 for member in group.members for at in read.get(member.parameter, ())})
        for group in program.groups
    }


def _made_and_read(
    graph: Graph, sections: tuple[Section, ...], program: Program
) -> tuple[dict[str, int], dict[str, list[int]]]:
    """After how many sections each value is made, and each input has been read, by a view of it too."""
    types = {name: symbol.type for name, symbol in program.symbols.items()} | dict(graph.values)
    aliases: dict[str, frozenset[str]] = {name: frozenset((name,)) for name in graph.inputs}
    made: dict[str, int] = {}
    read: dict[str, list[int]] = defaultdict(list)
    for position, section in enumerate(sections, start=1):
        for node in graph.section_nodes(section):
            operands = node.reads
            of_inputs = _NOTHING.union(*(aliases.get(name, _NOTHING) for name in operands))
            for name in of_inputs:
                read[name].append(position)
            for result in node.results:
                if result is None:
                    continue
                made[result] = position
                if node.operator in _MAY_BE_LEFT_OUT:
                    alike = [name for name in operands if types[name] == types[result]]
                    aliases[result] = _NOTHING.union(*(aliases.get(name, _NOTHING) for name in alike))
                else:
                    aliases[result] = of_inputs if may_alias(node) else _NOTHING
    for output in graph.outputs:  # outputs are read after the pass
        for name in aliases.get(output.value, _NOTHING):
            read[name].append(len(sections) + 1)
    return made, read


_MAY_ALIAS = (OperatorKind.VIEW, OperatorKind.COPY, OperatorKind.RANDOM, OperatorKind.RESIZE)
"""Operators that may return their operand's memory: a copy that changes nothing does, and so does dropout at 0."""

_MAY_BE_LEFT_OUT = frozenset(
    {"aten.positive.default", *(f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div"))}
)
"""A compiler may find that they change nothing (a product with ones), and return their operand."""


def kind_of(node: Node) -> OperatorKind | None:
    """The kind of the operator of `node`; None for compiled code, which returns memory of its own."""
    operator = OPERATORS.get(node.operator)
    return None if operator is None else operator.kind


def may_alias(node: Node) -> bool:
    """Whether a result of `node` may share memory with an operand."""
    return kind_of(node) in _MAY_ALIAS


def readers_of(nodes: Sequence[Node]) -> Mapping[str, Sequence[int]]:
    """By value: the positions of the nodes that read it, in order."""
    found = defaultdict(list)
    for position, node in enumerate(nodes):
        for name in dict.fromkeys(node.reads):
            found[name].append(position)
    return found


def aliases_of(value: str, nodes: Sequence[Node], readers: Mapping[str, Sequence[int]]) -> set[str]:
    """`value`, and all values that may share its memory. `readers`: those of `nodes`."""
    found, waiting = {value}, [value]
    while waiting:
        for position in readers.get(waiting.pop(), ()):
            if may_alias(nodes[position]):
                new = {result for result in nodes[position].results if result is not None} - found
                found |= new
                waiting += new
    return found
