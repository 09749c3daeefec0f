"""The training step and its update: invariants 5, 11 and 13; stages, their schedule and their
messages: invariant 16."""

from sambasim.errors import InvariantError, OptionError
from sambasim.ir.dataflow import axis_of, groups_of, pass_and_update
from sambasim.ir.graph import Argument, Graph, Node, Ref, SectionKind
from sambasim.ir.mesh import PIPELINE
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import LOSS_SCALE, MASTER, Program
from sambasim.ir.schedule import check
from sambasim.ir.stages import copied, ends_of, pipeline_ranks, ranks_of_values
from sambasim.ir.types import SymbolKind, TensorType
from sambasim.ir.verify.groups import require

_SECTION_KINDS = {
    "comm.reduce_scatter": SectionKind.REDUCE,
    "opt.square_sums": SectionKind.GRADNORM,
    "comm.all_gather": SectionKind.GATHER,
}
"""By operator on groups: the kind of its section. All others are optimizers."""


def verify_updates(graph: Graph, program: Program) -> None:
    """What works on groups. See `dataflow` for what each of these operators reads and writes."""
    groups = {group.name for group in program.groups}
    in_pass, update = pass_and_update(graph)
    kinds = [section.kind for section in in_pass]
    forward = kinds.count(SectionKind.FWD)
    ordered = kinds == [SectionKind.FWD] * forward + [SectionKind.BCKWD] * (len(kinds) - forward)
    require(ordered, 13, f"the sections of a pass of {graph.name} are {', '.join(kinds)}, not FWD and then BCKWD")
    for section in graph.sections:
        if graph is not program.training:
            require(section.kind is SectionKind.FWD, 13, f"{graph.name} has a section of kind {section.kind}")
        for node in graph.section_nodes(section):
            axis = axis_of(node)
            is_communication = OPERATORS[node.operator].kind is OperatorKind.COLLECTIVE
            known = axis in {one.name for one in program.mesh} or not is_communication
            require(known, 10, f"{node.name} communicates along {axis}, which is no axis of the mesh")
            named, kind = groups_of(node), _SECTION_KINDS.get(node.operator, SectionKind.OPT)
            if node.operator == "comm.copy":
                kind = _kind_of_copy(node, program)
            elif not named:
                plain = section not in update or not node.operator.startswith("aten.")
                require(plain, 13, f"{section.kind} section {section.index} holds {node.operator}")
                continue
            require(section.kind is kind, 13, f"{node.operator} is in a section of kind {section.kind}")
            require(groups.issuperset(named), 13, f"{node.name} names {', '.join(named)}: not all are groups")


def _kind_of_copy(node: Node, program: Program) -> SectionKind:
    """The kind of the section that it belongs to."""
    kinds = {SymbolKind.GRADIENT: SectionKind.REDUCE, SymbolKind.PARAMETER: SectionKind.GATHER}
    match node.args:
        case (str(), str(name)) if axis_of(node) == PIPELINE and name in program.symbols:
            found = kinds.get(program.symbols[name].kind)
        case _:
            found = None
    if found is None:
        raise InvariantError(13, f"{node.name} copies no parameter and no gradient to another stage")
    return found


def verify_training(program: Program) -> None:
    if program.training is None:
        require(not program.groups, 11, "a program without a training step has parameter groups")
        return
    loss = program.symbols.get(program.loss or "")
    inputs = [program.symbols[name] for name in program.training.inputs]
    types = [symbol.type for symbol in inputs if symbol.kind is SymbolKind.TANGENT]
    require(bool(types), 11, "the training step has no tangent")
    fits = loss is not None and loss.type in types
    require(fits, 11, f"no tangent is of the type of the loss: {', '.join(map(str, types))}")
    returned = [output.symbol for output in program.training.outputs]
    require(len(returned) == len(set(returned)), 11, "two outputs of the training step are kept in one symbol")
    require(program.loss in returned, 11, f"the training step does not return {program.loss}")
    for group in program.groups:
        for member in group.members:
            require(member.gradient in returned, 11, f"the training step does not return {member.gradient}")
    kinds = {f"opt.{optimizer.kind}" for optimizer in program.optimizers}
    updated = [name for node in program.training.nodes if node.operator in kinds for name in groups_of(node)]
    require(updated == [group.name for group in program.groups], 11, f"the optimizer nodes update {updated}")
    _verify_order(program, program.training)
    _verify_norm(program, program.training)


_NORM_OPERATORS = ("opt.square_sums", "opt.total_norm")


def _verify_norm(program: Program, training: Graph) -> None:
    """The chain from the squares of all gradients to every optimizer, if gradients are clipped."""
    groups = tuple(group.name for group in program.groups)
    by_operator = {one: [node for node in training.nodes if node.operator == one] for one in _NORM_OPERATORS}
    updates = [node for node in training.nodes if node.operator in {f"opt.{one.kind}" for one in program.optimizers}]
    squares, norms = by_operator.values()
    reached = 0
    for member in sorted((one for group in program.groups for one in group.members), key=lambda one: one.block):
        require(member.block == reached, 11, f"the blocks of {member.parameter} begin at {member.block}, not {reached}")
        reached += member.blocks
    if squares:
        count = training.values[squares[0].results[0] or ""].numel
        require(count == reached, 11, f"{squares[0].name} has {count} sums for {reached} blocks")
    scales = any(argument.name == LOSS_SCALE for argument in program.runtime_arguments)
    unscales = bool(norms) and all(MASTER in one.states for one in program.optimizers)
    require(unscales or not scales, 11, "the loss is scaled, and gradients are not all checked and unscaled")
    require(len(squares) == len(norms) <= 1, 11, f"{len(squares)} nodes sum squares for {len(norms)} norms")
    operands: tuple[Ref, ...] = ()
    if squares and norms:
        require(squares[0].args == (groups,), 11, f"{squares[0].name} does not sum the squares of all groups")
        expected = squares[0].results[0]
        left = {axis.name for axis in program.mesh}
        while left:
            along = [node for node in training.nodes if node.reads == (expected,)]
            axis = axis_of(along[0]) if len(along) == 1 else None
            summed = axis in left and along[0].operator == "comm.all_reduce"
            right = summed and dict(along[0].kwargs) == {"axis": axis, "op": "sum", "order": "tree"}
            require(right, 11, f"the squares of {squares[0].name} are not summed once over the axis {min(left)}")
            left.discard(axis or "")
            expected = along[0].results[0]
        require(norms[0].args == (Ref(expected or ""),), 11, f"{norms[0].name} is not the norm of all gradients")
        operands = (Ref(norms[0].results[0] or ""),)
    for node in updates:
        require(node.args[1:] == operands, 11, f"{node.name} clips otherwise than the other optimizers")


def _verify_order(program: Program, training: Graph) -> None:
    """Each group passes the operators of `order` once, in later and later sections; "back" copies a parameter back."""
    updates = {f"opt.{optimizer.kind}" for optimizer in program.optimizers}
    order = ["comm.copy", "comm.reduce_scatter", "opt.square_sums", "opt", "comm.all_gather", "back"]
    parameters = {member.parameter for group in program.groups for member in group.members}
    reached: dict[str, tuple[int, int]] = {}
    for section in training.sections:
        for node in training.section_nodes(section):
            operator = "opt" if node.operator in updates else node.operator
            if copied(node) in parameters:
                operator = "back"
            place = order.index(operator) if groups_of(node) else 0
            for group in groups_of(node):
                before = reached.get(group, (-1, -1))
                ordered = before[0] < place and before[1] < section.index
                require(ordered, 5, f"{node.name} is too early in section {section.index}, or there twice")
                reached[group] = (place, section.index)


_LARGEST_TAG = 30_000
"""MPI has tags up to 32,767 everywhere."""


def verify_pipeline(program: Program) -> None:
    schedule, ranks = program.schedule, pipeline_ranks(program)
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
        made: dict[str, int] = {}
        messages: dict[tuple[int, int], TensorType] = {}
        tags: set[tuple[int, int]] = set()
        order = [
            (one.kind is SectionKind.BCKWD, -one.stage if one.kind is SectionKind.BCKWD else one.stage)
            for one in in_pass
        ]
        require(order == sorted(order), 16, f"the sections of {graph.name} are not in the order of stages")
        for section in in_pass:
            rank = section.stage % ranks
            require(0 <= section.stage < schedule.stages, 16, f"section {section.index} is of stage {section.stage}")
            for node in graph.section_nodes(section):
                for name in node.reads:
                    require(made.get(name, rank) == rank, 16, f"{node.name} reads {name}, which another rank makes")
                made.update((name, rank) for name in node.results if name is not None)
                if axis_of(node) != PIPELINE:
                    continue
                given = dict(node.kwargs)
                peer, tag = (rank + _whole(given.get("shift"))) % ranks, _whole(given.get("tag"))
                require(0 <= tag <= _LARGEST_TAG, 16, f"{node.name} has the tag {tag}")
                if node.operator == "comm.send":
                    names = node.reads
                    require(len(names) == 1 and (peer, tag) not in tags, 16, f"{node.name} sends {len(names)} values")
                    tags.add((peer, tag))
                    messages[peer, tag] = graph.values.get(names[0]) or program.symbols[names[0]].type
                elif node.operator == "comm.recv":
                    sent = messages.pop((rank, tag), None)
                    require(sent == graph.values[node.results[0] or ""], 16, f"nothing sends what {node.name} receives")
        require(not messages, 16, f"nothing receives {len(messages)} messages of {graph.name}")


def verify_copies(program: Program) -> None:
    training, ranks = program.training, pipeline_ranks(program)
    if training is None or ranks == 1:
        return
    made, _ = ranks_of_values(training, ranks)
    source_of = {output.symbol: made.get(output.value, 0) for output in training.outputs}
    reads = [ranks_of_values(graph, ranks)[1] for graph in program.graphs]
    copies = {symbol: node for node in training.nodes if (symbol := copied(node)) is not None}
    expected = []
    for group in program.groups:
        for member in group.members:
            source = source_of[member.gradient]
            others = set().union(*(read.get(member.parameter, ()) for read in reads)) - {source}
            if not others:
                continue
            (target, *more), alone = others, len(group.members) == 1
            require(alone and not more, 16, f"{member.parameter} is read on the ranks {sorted({source, *others})}")
            for symbol, ends in ((member.gradient, (source, target)), (member.parameter, (target, source))):
                node = copies.get(symbol)
                right = node is not None and groups_of(node) == (group.name,) and ends_of(node) == ends
                require(right, 16, f"{symbol} is not copied from rank {ends[0]} to rank {ends[1]}")
                expected.append(symbol)
    require(sorted(copies) == sorted(expected), 16, f"the update copies {sorted(copies)}, not {sorted(expected)}")
    for node in copies.values():
        tag = _whole(dict(node.kwargs).get("tag"))
        require(0 <= tag <= _LARGEST_TAG, 16, f"{node.name} has the tag {tag}")


def _whole(argument: Argument) -> int:
    if isinstance(argument, int):
        return argument
    raise InvariantError(16, f"a message with the shift or tag {argument!r}")
