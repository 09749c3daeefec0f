"""The training step, its update and its pipeline: invariants 5, 10, 11, 13 and 16 of `verify`."""

from math import prod

from sambasim.errors import MOST_REPLICAS, InvariantError, OptionError
from sambasim.ir.dataflow import axis_of, groups_of, number_of, pass_and_update
from sambasim.ir.graph import Graph, Node, Ref, SectionKind
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, copy_mesh
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import LOSS_SCALE, MASTER, Program
from sambasim.ir.ranks import copied, ends_of, holders_of_gradients
from sambasim.ir.schedule import check
from sambasim.ir.types import DTYPE_BYTES, SymbolKind, TensorType

_ORDER = {
    SymbolKind.GRADIENT: SectionKind.REDUCE,
    "comm.reduce_scatter": SectionKind.REDUCE,
    "opt.square_sums": SectionKind.GRADNORM,
    "opt": SectionKind.OPT,
    "comm.all_gather": SectionKind.GATHER,
    SymbolKind.PARAMETER: SectionKind.GATHER,
}
"""What an update does with a group, in order, with the kind of section: copy the gradient to another stage, the
operators, of which all others are optimizers, and copy the parameter back."""


def require(condition: bool, number: int, what: str) -> None:
    if not condition:
        raise InvariantError(number, what)


def sections_of_groups(program: Program) -> None:
    """What works on groups. See `dataflow` for what each of these operators reads and writes."""
    groups, axes = {group.name for group in program.groups}, {axis.name for axis in program.mesh}
    for graph in program.graphs:
        in_pass, update = pass_and_update(graph)
        kinds = [section.kind for section in in_pass]
        forward = kinds.count(SectionKind.FWD)
        ordered = kinds == [SectionKind.FWD] * forward + [SectionKind.BCKWD] * (len(kinds) - forward)
        require(ordered, 13, f"the sections of a pass of {graph.name} are {', '.join(kinds)}, not FWD and then BCKWD")
        for section in graph.sections:
            is_forward = section.kind is SectionKind.FWD or graph is program.training
            require(is_forward, 13, f"{graph.name} has a section of kind {section.kind}")
            for node in graph.section_nodes(section):
                axis, named = axis_of(node), groups_of(node)
                known = axis in axes or OPERATORS[node.operator].kind is not OperatorKind.COLLECTIVE
                require(known, 10, f"{node.name} communicates along {axis}, which is no axis of the mesh")
                if node.operator != "comm.copy" and not named:
                    plain = section not in update or not node.operator.startswith("aten.")
                    require(plain, 13, f"{section.kind} section {section.index} holds {node.operator}")
                    continue
                right = section.kind is _ORDER[_done_by(node, program)]
                require(right, 13, f"{node.operator} is in a section of kind {section.kind}")
                require(groups.issuperset(named), 13, f"{node.name} names {', '.join(named)}: not all are groups")


def _done_by(node: Node, program: Program) -> str:
    """Which part of an update `node` is, which works on groups."""
    if node.operator != "comm.copy":
        return node.operator if node.operator in _ORDER else "opt"
    match node.args:
        case (str(), str(name)) if axis_of(node) == PIPELINE and name in program.symbols:
            if (kind := program.symbols[name].kind) in _ORDER:
                return kind
    raise InvariantError(13, f"{node.name} copies no parameter and no gradient to another stage")


def training_step(program: Program) -> None:
    training, loss = program.training, program.symbols.get(program.loss or "")
    if training is None:
        require(not program.groups, 11, "a program without a training step has parameter groups")
        return
    inputs = [program.symbols[name] for name in training.inputs]
    types = [symbol.type for symbol in inputs if symbol.kind is SymbolKind.TANGENT]
    require(bool(types), 11, "the training step has no tangent")
    fits = loss is not None and loss.type in types
    require(fits, 11, f"no tangent is of the type of the loss: {', '.join(map(str, types))}")
    returned = [output.symbol for output in training.outputs]
    require(len(returned) == len(set(returned)), 11, "two outputs of the training step are kept in one symbol")
    gradients = [member.gradient for group in program.groups for member in group.members]
    for name in (program.loss, *gradients, *([] if program.count is None else [program.count])):
        require(name in returned, 11, f"the training step does not return {name}")
    for name, symbol in program.logged.items():
        is_scalar = symbol in returned and program.symbols[symbol].type.numel == 1
        require(is_scalar, 11, f"the training step returns no number {symbol}, to be logged as {name}")
    for graph in filter(None, (program.evaluation, program.single)):
        outputs = [program.symbols[output.symbol].type.numel for output in graph.outputs]
        at = program.evaluated.values()
        require(all(outputs[place : place + 1] == [1] for place in at), 11, f"{graph.name} lacks a number to be logged")
    updated = [name for node in _updates(program) for name in groups_of(node)]
    require(updated == [group.name for group in program.groups], 11, f"the optimizer nodes update {updated}")
    _verify_order(program)
    _verify_norm(program)


def _updates(program: Program) -> list[Node]:
    """The nodes of optimizers."""
    kinds = {f"opt.{optimizer.kind}" for optimizer in program.optimizers}
    return [node for node in program.step.nodes if node.operator in kinds]


def _verify_norm(program: Program) -> None:
    """The chain from the squares of all gradients to every optimizer, if gradients are clipped."""
    training, reached = program.step, 0
    members = [member for group in program.groups for member in group.members]
    for member in sorted(members, key=lambda member: member.block):
        require(member.block == reached, 11, f"the blocks of {member.parameter} begin at {member.block}, not {reached}")
        reached += member.blocks
    squares = [node for node in training.nodes if node.operator == "opt.square_sums"]
    norms = [node for node in training.nodes if node.operator == "opt.total_norm"]
    scales = any(argument.name == LOSS_SCALE for argument in program.runtime_arguments)
    unscales = bool(norms) and all(MASTER in optimizer.states for optimizer in program.optimizers)
    require(unscales or not scales, 11, "the loss is scaled, and gradients are not all checked and unscaled")
    require(len(squares) == len(norms) <= 1, 11, f"{len(squares)} nodes sum squares for {len(norms)} norms")
    operands: tuple[Ref, ...] = ()
    for square, norm in zip(squares, norms, strict=True):
        groups = tuple(group.name for group in program.groups)
        require(square.args == (groups,), 11, f"{square.name} does not sum the squares of all groups")
        total = square.results[0] or ""
        count = training.values[total].numel
        require(count == reached, 11, f"{square.name} has {count} sums for {reached} blocks")
        left = {axis.name for axis in program.mesh}
        while left:
            along = [node for node in training.nodes if node.reads == (total,)]
            axis = axis_of(along[0]) if len(along) == 1 else None
            summed = axis in left and along[0].operator == "comm.all_reduce"
            right = summed and dict(along[0].kwargs) == {"axis": axis, "op": "sum", "order": "tree"}
            require(right, 11, f"the squares of {square.name} are not summed once over the axis {min(left)}")
            left.discard(axis or "")
            total = along[0].results[0] or ""
        require(norm.args == (Ref(total),), 11, f"{norm.name} is not the norm of all gradients")
        operands = (Ref(norm.results[0] or ""),)
    for node in _updates(program):
        require(node.args[1:] == operands, 11, f"{node.name} clips otherwise than the other optimizers")


def _verify_order(program: Program) -> None:
    """Each group passes the parts of an update once, in later and later sections."""
    reached: dict[str, tuple[int, int]] = {}
    for section, node in program.step.nodes_in(program.step.sections):
        for group in groups_of(node):
            before, place = reached.get(group, (-1, -1)), [*_ORDER].index(_done_by(node, program))
            ordered = before[0] < place and before[1] < section.index
            require(ordered, 5, f"{node.name} is too early in section {section.index}, or there twice")
            reached[group] = (place, section.index)


_EXCHANGES = {
    "comm.reduce_scatter": {"axis": DATA_PARALLEL, "order": "tree", "op": "mean"},
    "comm.all_gather": {"axis": DATA_PARALLEL},
}
_MOST_ZERO = 3


def data_parallel(program: Program) -> None:
    axes = [axis.name for axis in program.mesh]
    require(len(axes) == len(set(axes)), 10, f"the mesh has an axis twice: {', '.join(axes)}")
    ranks = prod(axis.size for axis in program.mesh)
    require(ranks <= MOST_REPLICAS, 10, f"the mesh has {ranks:,} ranks, and at most {MOST_REPLICAS:,} are possible")
    for axis in program.mesh:
        require(axis.size >= 1, 10, f"the axis {axis.name} has the size {axis.size}")
        fits = axis.chips == 1 or (axis.name == DATA_PARALLEL and axis.chips > 1 and axis.size % axis.chips == 0)
        require(fits, 10, f"the axis {axis.name} has {axis.size} ranks, and {axis.chips} chips a replica")
        several = axis.name == DATA_PARALLEL and axis.size > axis.chips
        require(axis.at_run_time or not several, 10, f"the axis {axis.name} has a fixed number of replicas")
    predicts = program.training is None and program.chips == 1 and not program.data_parallel
    right = predicts or (DATA_PARALLEL in axes) == program.data_parallel
    require(right, 10, "the axis dp of a training step goes with a reduce buffer")
    right = 0 <= program.zero <= _MOST_ZERO * program.data_parallel
    require(right, 10, f"ZeRO {program.zero} of replicas that sync nothing, or of an unknown level")
    for group in program.groups:
        right = (group.wrapper is not None) == program.data_parallel
        require(right, 10, f"the gradients of {group.name} have the wrapper {group.wrapper}")
    if not program.data_parallel:
        return
    if program.training is None:
        raise InvariantError(10, "data parallelism without a training step")
    names = sorted(group.name for group in program.groups)
    for operator, keywords in _EXCHANGES.items():
        exchanges = [
            (section, node)
            for section, node in program.training.nodes_in(program.training.sections)
            if node.operator == operator and groups_of(node)
        ]
        for _, node in exchanges:
            require(dict(node.kwargs) == keywords, 10, f"{operator} of groups must have {keywords}")
        sections = {section.index for section, _ in exchanges}
        require(len(sections) == 1, 10, f"{operator} of groups is not in one section")
        every = sorted(name for _, node in exchanges for name in groups_of(node)) == names
        require(every, 10, f"{operator} is not there for each group")
    for group in program.groups:
        wrapper = program.symbols.get(group.wrapper or "")
        lies = wrapper and (wrapper.offset, wrapper.type.numel)
        right = lies == (group.regions["gradient"], group.numel)
        require(right, 10, f"{group.wrapper} does not wrap the gradients of {group.name}")
    buffer = program.symbols.get(program.reduce_buffer or "")
    needed = max((group.numel * DTYPE_BYTES[group.dtype] for group in program.groups), default=0)
    holds = buffer is not None and buffer.offset is not None and buffer.type.size_bytes >= needed
    require(holds, 10, f"the reduce buffer {program.reduce_buffer} does not hold {needed} bytes")


_LARGEST_TAG = 30_000  # MPI has tags up to 32,767 everywhere


def pipeline(program: Program) -> None:
    schedule, ranks = program.schedule, copy_mesh(program.mesh).size(PIPELINE)
    require((schedule is None) == all(axis.name != PIPELINE for axis in program.mesh), 16, "a pipeline has a schedule")
    if schedule is None:
        return
    require(schedule.ranks == ranks, 16, f"the schedule is for {schedule.ranks} ranks, and the axis pp has {ranks}")
    try:
        check(schedule)
    except OptionError as error:
        raise InvariantError(16, f"the schedule cannot run: {error.what}") from None
    for graph in program.graphs:
        in_pass, _ = pass_and_update(graph)
        places = [(0, section.stage) if section.kind is SectionKind.FWD else (1, -section.stage) for section in in_pass]
        require(places == sorted(places), 16, f"the sections of {graph.name} are not in order of stages")
        for section in in_pass:
            require(0 <= section.stage < schedule.stages, 16, f"section {section.index} is of stage {section.stage}")
        _verify_messages(graph, program, ranks)


def _verify_messages(graph: Graph, program: Program, ranks: int) -> None:
    made: dict[str, int] = {}
    messages: dict[tuple[int, int], TensorType] = {}
    tags: set[tuple[int, int]] = set()
    for section, node in graph.nodes_in(pass_and_update(graph)[0]):
        rank = section.stage % ranks
        for name in node.reads:
            require(made.get(name, rank) == rank, 16, f"{node.name} reads {name}, which another rank makes")
        made |= dict.fromkeys(node.makes, rank)
        if axis_of(node) != PIPELINE:
            continue
        peer, tag = (rank + number_of(node, "shift")) % ranks, _tag(node)
        if node.operator == "comm.send":
            names = node.reads
            require(len(names) == 1 and (peer, tag) not in tags, 16, f"{node.name} sends {len(names)} values")
            tags.add((peer, tag))
            messages[peer, tag] = graph.values.get(names[0]) or program.symbols[names[0]].type
        elif node.operator == "comm.recv":
            sent = messages.pop((rank, tag), None)
            require(sent == graph.values[node.results[0] or ""], 16, f"nothing sends what {node.name} receives")
    require(not messages, 16, f"nothing receives {len(messages)} messages of {graph.name}")


def copies(program: Program) -> None:
    nodes = program.training.nodes if program.training and copy_mesh(program.mesh).size(PIPELINE) > 1 else ()
    copy_nodes = {symbol: node for node in nodes if (symbol := copied(node)) is not None}
    holders, expected = holders_of_gradients(program), []
    for group, member in ((one, member) for one in program.groups for member in one.members):
        source, others = holders.get(member.gradient, (0, set[int]()))
        if not others:
            continue
        alone = len(others) == len(group.members) == 1
        require(alone, 16, f"{member.parameter} is read on the ranks {sorted({source, *others})}")
        (target,) = others
        for symbol, ends in ((member.gradient, (source, target)), (member.parameter, (target, source))):
            node = copy_nodes.get(symbol)
            right = node is not None and groups_of(node) == (group.name,) and ends_of(node) == ends
            require(right, 16, f"{symbol} is not copied from rank {ends[0]} to rank {ends[1]}")
            expected.append(symbol)
    copied_symbols, expected = sorted(copy_nodes), sorted(expected)
    require(copied_symbols == expected, 16, f"the update copies {copied_symbols}, not {expected}")
    for node in copy_nodes.values():
        _tag(node)


def _tag(node: Node) -> int:
    tag = number_of(node, "tag")
    require(0 <= tag <= _LARGEST_TAG, 16, f"{node.name} has the tag {tag}")
    return tag
