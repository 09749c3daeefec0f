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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from sambasim.errors import InvariantError
from sambasim.ir.graph import Graph, Node, Section, SectionKind, leaves
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.schedule import ActionKind


def groups_of(node: Node) -> tuple[str, ...]:
    """The parameter groups that `node` works on, by name; none for an ATen operator, or for communication of values."""
    if node.operator.startswith("aten."):
        return ()
    return tuple(name for name in leaves(node.args[:1]) if isinstance(name, str))


def axis_of(node: Node) -> str | None:
    """The mesh axis along which `node` communicates; None for a node that does not."""
    axis = dict(node.kwargs).get("axis") if node.operator.startswith("comm.") else None
    return axis if isinstance(axis, str) else None


def number_of(node: Node, keyword: str, default: int | None = None) -> int:
    """A whole number that `node` has by keyword. Raises InvariantError if it has none."""
    number = dict(node.kwargs).get(keyword, default)
    if type(number) is not int:
        raise InvariantError(16, f"the {keyword} of {node.name} is {number!r}")
    return number


@dataclass(frozen=True, slots=True)
class Gather:
    """What ranks gather in a pass for an operator of `module`, or to give out a gradient or an output whole."""

    operator: str
    module: str
    received_bytes: int


def gathers(graph: Graph, axis: str, ranks: int) -> Sequence[Gather]:
    """What is gathered along `axis`, in the order of execution."""
    first_readers = {name: node for node in reversed(graph.nodes) for name in node.reads}
    given_out = Node("", "gradients" if graph.name == "training" else "outputs")
    gathers = []
    for node in graph.nodes:
        if node.operator == "comm.all_gather" and axis_of(node) == axis and not groups_of(node):
            name = node.results[0] or ""
            size_bytes = graph.values[name].size_bytes // ranks * (ranks - 1)
            reader = first_readers.get(name)
            while reader is not None and reader.operator == "comm.shard":
                reader = first_readers.get(reader.results[0] or "")
            reader = reader or given_out
            gathers.append(Gather(reader.operator, reader.module, size_bytes))
    return gathers


def section_effects(program: Program, graph: Graph, section: Section) -> tuple[set[str], set[str]]:
    """What a section reads of others and writes for them: values, symbols, regions of groups ("group0.gradient")."""
    nodes = graph.section_nodes(section)
    made = {name for node in nodes for name in node.makes}
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
    return read, written


def _regions(node: Node, group: ParameterGroup, program: Program) -> tuple[tuple[str, ...], tuple[str, ...]]:
    match node.operator:
        case "comm.reduce_scatter":
            return ("gradient",), ("gradient",)
        case "comm.all_gather":
            return ("parameter",), ("parameter",)
        case "memory.release":
            return (), (str(node.args[1]),)
        case "comm.copy":
            region = program.symbols[str(node.args[1])].kind.value  # "gradient" or "parameter"
            return (region,), (region,)
        case "opt.square_sums":
            return ("gradient",), ()
    changed = ("parameter", *program.optimizers[group.optimizer].states)
    return ("gradient", *changed), changed


def pass_and_update(graph: Graph) -> tuple[tuple[Section, ...], tuple[Section, ...]]:
    """The sections that run in every micro-step, and those that run once, when all micro-steps have."""
    in_pass = (SectionKind.FWD, SectionKind.BCKWD)
    stop = max((at for at, section in enumerate(graph.sections, start=1) if section.kind in in_pass), default=0)
    return graph.sections[:stop], graph.sections[stop:]


def actions_of(sections: Sequence[Section]) -> list[Section]:
    """One section for all of each action of a schedule: the forward of a stage, and one or two for its backward."""
    runs = (tuple(run) for _, run in groupby(sections, key=lambda part: (part.kind, part.stage, part.weights_only)))
    return [replace(run[0], index=index, stop=run[-1].stop) for index, run in enumerate(runs)]


def spans_of_actions(sections: Sequence[Section]) -> Mapping[tuple[ActionKind, int], tuple[int, int]]:
    """The range of sections that each kind of action runs, by stage; an empty one where there are none."""
    spans: dict[tuple[ActionKind, int], tuple[int, int]] = defaultdict(lambda: (0, 0))
    for section in sections:
        if section.kind is SectionKind.FWD:
            kinds = [ActionKind.FORWARD]
        else:
            part = ActionKind.WEIGHT_GRADIENTS if section.weights_only else ActionKind.INPUT_GRADIENTS
            kinds = [ActionKind.BACKWARD, part]
        for kind in kinds:
            start, _ = spans.get((kind, section.stage), (section.index, section.index))
            spans[kind, section.stage] = start, section.index + 1
    return spans


def is_clipped(program: Program) -> bool:
    return any(node.operator == "opt.square_sums" for node in (program.training.nodes if program.training else ()))


@dataclass(frozen=True, slots=True)
class Readiness:
    """After how many sections of a pass a group's gradients are complete, and its parameters read no more; and which
    sections read them, ascending. Their number stands for the time after the pass. Or the same in nodes."""

    reduce: int
    update: int
    readers: tuple[int, ...] = ()


def readiness(program: Program, *, by_node: bool = False) -> Mapping[str, Readiness]:
    """For each group, by name. One more than a pass has sections, or nodes, means: when the whole pass has ended."""
    training = program.training
    if training is None:
        return {group.name: Readiness(1, 1) for group in program.groups}
    sections, _ = pass_and_update(training)
    end = (sections[-1].stop if by_node and sections else len(sections)) + 1
    made, read = _usage(training, sections, program, end, by_node=by_node)
    ready = {}
    for group in program.groups:
        names = {member.gradient for member in group.members}
        values = [output.value for output in training.outputs if output.symbol in names]
        complete = max((made.get(value, end) for value in values), default=end)
        after = sorted({at for member in group.members for at in read.get(member.parameter, ())})
        ready[group.name] = Readiness(complete, max(complete, *after[-1:]), tuple(at - 1 for at in after))
    return ready


def _usage(
    graph: Graph, sections: Sequence[Section], program: Program, end: int, *, by_node: bool
) -> tuple[dict[str, int], dict[str, list[int]]]:
    """After how many sections or nodes each value is made, and each input has been read, by a view of it too. Outputs
    are read at the `end`."""
    types = graph.types(program.symbols)
    aliases = {name: {name} for name in graph.inputs}  # by value, the inputs whose memory it may share
    made: dict[str, int] = {}
    read: dict[str, list[int]] = defaultdict(list)
    for number, (section, node) in enumerate(graph.nodes_in(sections), start=1):
        position = number if by_node else section.index + 1
        for name in {name for operand in node.reads for name in aliases.get(operand, ())}:
            read[name].append(position)
        for result in node.makes:
            made[result] = position
            shared = node.reads if may_alias(node) else ()
            if node.operator in _MAY_BE_LEFT_OUT:
                shared = tuple(name for name in node.reads if types[name] == types[result])
            if shared:
                aliases[result] = set().union(*(aliases.get(name, ()) for name in shared))
    for output in graph.outputs:
        for name in aliases.get(output.value, ()):
            read[name].append(end)
    return made, read


_MAY_BE_LEFT_OUT = ("aten.positive.default", "aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor", "aten.div.Tensor")
"""A compiler may find that they change nothing (a product with ones), and return their operand."""


def kind_of(node: Node) -> OperatorKind | None:
    """The kind of the operator of `node`; None for compiled code, which returns memory of its own."""
    return OPERATORS[node.operator].kind if node.operator in OPERATORS else None


def is_view(node: Node) -> bool:
    return kind_of(node) is OperatorKind.VIEW


def may_alias(node: Node) -> bool:
    """Whether a result of `node` may share an operand's memory, as of a copy that changes nothing, or dropout at 0."""
    return kind_of(node) in (OperatorKind.VIEW, OperatorKind.COPY, OperatorKind.RANDOM, OperatorKind.RESIZE)


def readers_of(nodes: Sequence[Node]) -> Mapping[str, Sequence[int]]:
    """By value: the positions of the nodes that read it, in order."""
    found = defaultdict(list)
    for position, node in enumerate(nodes):
        for name in dict.fromkeys(node.reads):
            found[name].append(position)
    return found


def last_uses(nodes: Sequence[Node], keep: Collection[str]) -> list[list[str]]:
    """For each node, the results of `nodes` that no later one reads, without those to `keep`."""
    left = {name for node in nodes for name in node.makes}.difference(keep)
    last: list[list[str]] = []
    for node in reversed(nodes):
        last.append([name for name in dict.fromkeys((*node.reads, *node.makes)) if name in left])
        left.difference_update(last[-1])
    return last[::-1]


def has_effect(node: Node) -> bool:
    """Whether it checks something, or draws random numbers, which moves the generator for the nodes after it."""
    operator = OPERATORS.get(node.operator)  # None for one of numbers
    effects = (OperatorKind.CHECK, OperatorKind.GENERATOR)
    return operator is not None and (operator.draws_random_numbers or operator.kind in effects)


def needed_for(wanted: Collection[str], nodes: Sequence[Node], effects: Collection[str]) -> tuple[list[Node], set[str]]:
    """Of `nodes`, those that lead to `wanted` values, or to one of the nodes called `effects`; and what these read."""
    kept, read = [], set(wanted)
    for node in reversed(nodes):
        message = f"message {dict(node.kwargs).get('tag')}"  # what a send and its receive have in common
        is_read = message in read if node.operator == "comm.send" else not read.isdisjoint(node.results)
        if is_read or node.name in effects:
            kept.append(node)
            read.update(node.reads, [message] if node.operator == "comm.recv" else ())
    return kept[::-1], read


def aliases_of(value: str, nodes: Sequence[Node], readers: Mapping[str, Sequence[int]]) -> set[str]:
    """`value`, and all values that may share its memory. `readers`: those of `nodes`."""
    aliases, waiting = {value}, [value]
    while waiting:
        for position in readers.get(waiting.pop(), ()):
            if may_alias(nodes[position]):
                new = set(filter(None, nodes[position].results)) - aliases
                aliases |= new
                waiting += new
    return aliases
