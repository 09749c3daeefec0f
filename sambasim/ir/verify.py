"""The invariants of a program, each with a number and a sentence.

Every builder and every pass ends in `verify`, and so does reading a PEF: a pass may assume a valid program and must
leave one. Invariants 9 and 11 hold once the optimizer is attached, 7 and 8 once everything has its place in device
memory; a PEF is always at that last stage.

     1  every value is defined once, and is no symbol
     2  every reference names a symbol that the graph takes in, or the result of an earlier node
     3  every operator and every constant of torch is in its table of permitted ones
     4  sections are numbered from 0, and cover every node once and in order
     5  the nodes that work on a group come in the order of its data, each in a section behind the one before: the
        backward completes its gradients, copy, reduce_scatter, square_sums, the optimizer, all_gather, copy
     6  an output's value has the type of the symbol that keeps it; gradients have the type of their parameters
     7  a symbol in device memory is aligned, inside it, and overlaps no other but the accumulation group around it
     8  members of a group start at multiples of 64 elements, in order, and lie where the group's regions say
     9  groups have distinct names; every gradient and every optimizer state belongs to exactly one of them
    10  with the axis dp, one REDUCE section reduces every group along it (the mean, in the order of the tree), and one
        GATHER section gathers every group; each has a gradient group and fits into the reduce buffer. Without the axis
        there is none of these. Its size is a multiple of the chips of a replica, and one replica unless a run chooses.
        Communication names an axis of the mesh, and what is cut has a part for each rank on one
    11  a training step has a loss, a tangent of its type, and one optimizer node for each group; it returns every
        gradient. If one optimizer clips, all do, by the norm of all gradients, summed over every axis of the mesh
    12  every type and every size is within what a machine can address
    13  nodes that work on groups name groups of the program, in sections of their kind, behind every other node;
        evaluation graphs are all FWD
    14  the first extent of every input is the batch size
    15  an output of a graph is kept in a symbol of kind output, gradient or buffer
    16  with the axis pp there is a schedule for its ranks that can run, and without it there is none; a section of a
        pass has a stage of the schedule, and reads only what its own rank makes, or receives from the one that sends
        it. A trained parameter is read where its gradient is completed. If one more rank reads it, that rank updates
        it, in a group of its own: copy nodes bring the gradient there and the parameter back
"""

from collections.abc import Collection, Iterable
from enum import IntEnum
from itertools import pairwise
from operator import itemgetter

from sambasim.errors import InvariantError, OptionError
from sambasim.ir.dataflow import axis_of, groups_of, pass_and_update
from sambasim.ir.graph import TORCH_CONSTANTS, Argument, Graph, Node, Ref, SectionKind, TorchConstant, node_references
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import LOSS_SCALE, MASTER, ParameterGroup, Program
from sambasim.ir.schedule import check
from sambasim.ir.stages import copied, ends_of, pipeline_ranks, ranks_of_values, symbols_of_ranks
from sambasim.ir.types import ALIGNMENT_BYTES, ALIGNMENT_ELEMENTS, DTYPE_BYTES, Symbol, SymbolKind, TensorType

LARGEST_BYTES = 1 << 46
"""64 TiB: more than any machine that we know of has, and far from where arithmetic on sizes could overflow."""

HIGHEST_RANK = 64
"""Dimensions of a tensor; torch's own limit. It keeps the products of shapes in a file from becoming astronomical."""


class Progress(IntEnum):
    """How far the compiler is with a program."""

    CAPTURED = 0
    OPTIMIZED = 1  # the optimizer is attached, parameters are in groups
    PLACED = 2  # every symbol has its address in device memory


def verify(program: Program, stage: Progress = Progress.PLACED) -> None:
    """Raises InvariantError, with the number of the first invariant that `program` breaks."""
    _verify_types(program)
    for graph in program.graphs:
        _verify_values(graph, program)
        _verify_sections(graph)
        _verify_outputs(graph, program)
        _verify_updates(graph, program)
    _verify_pipeline(program)
    if stage >= Progress.OPTIMIZED:
        _verify_ownership(program)
        _verify_training(program)
        _verify_copies(program)
    if stage >= Progress.PLACED:
        _verify_memory(program)
        for group in program.groups:
            _verify_group(group, program)
        _verify_data_parallel(program)


def _require(condition: bool, number: int, what: str) -> None:
    if not condition:
        raise InvariantError(number, what)


def _symbol(name: str, program: Program, number: int, otherwise: str) -> Symbol:
    symbol = program.symbols.get(name)
    if symbol is None:
        raise InvariantError(number, otherwise)
    return symbol


def _verify_types(program: Program) -> None:
    def check(name: str, type_: TensorType) -> None:
        _require(type_.dtype in DTYPE_BYTES, 12, f"{name} has the unknown dtype {type_.dtype!r}")
        _require(len(type_.shape) <= HIGHEST_RANK, 12, f"{name} has {len(type_.shape)} dimensions")
        _require(all(0 <= extent <= LARGEST_BYTES for extent in type_.shape), 12, f"{name} has the shape {type_.shape}")
        _require(type_.size_bytes <= LARGEST_BYTES, 12, f"{name} would need {type_.size_bytes} bytes")

    axes = {(axis.name, axis.size) for axis in program.mesh if not axis.at_run_time}
    for name, symbol in program.symbols.items():
        _require(name == symbol.name, 1, f"symbol {symbol.name} is filed under {name}")
        check(name, symbol.type)
        for cut in symbol.cuts:
            exists = 0 <= cut.dim < len(symbol.type.shape) and cut.outer >= 1
            fits = exists and symbol.type.shape[cut.dim] % cut.outer == 0
            _require(fits and (cut.axis, cut.parts) in axes, 10, f"{name} is cut otherwise than the mesh: {cut}")
        check(name, symbol.whole)
    for graph in program.graphs:
        for name, type_ in graph.values.items():
            check(name, type_)
    _require(program.batch_size >= 1, 12, f"the batch size is {program.batch_size}")
    for symbol in program.symbols.values():
        batched = symbol.kind is not SymbolKind.INPUT or symbol.type.shape[:1] == (program.batch_size,)
        _require(batched, 14, f"{symbol.name} is {symbol.type}, but the batch size is {program.batch_size}")
    _require(0 <= program.device_bytes <= LARGEST_BYTES, 12, f"device memory of {program.device_bytes} bytes")


def _verify_values(graph: Graph, program: Program) -> None:
    known = set(graph.inputs)
    for name in graph.inputs:
        _require(name in program.symbols, 2, f"{graph.name} takes in {name}, which is no symbol")
    for node in graph.nodes:
        permitted = node.operator in OPERATORS and OPERATORS[node.operator].kind is not OperatorKind.MEMORY
        _require(permitted, 3, f"node {node.name} is {node.operator}, which is not permitted")
        _verify_constants(node.name, node.args)
        _verify_constants(node.name, node.kwargs)
        for name in node_references(node):
            _require(name in known, 2, f"node {node.name} reads {name}, which nothing before it defines")
        for result in node.results:
            if result is not None:
                _require(result not in known and result not in program.symbols, 1, f"{result} is defined twice")
                _require(result in graph.values, 1, f"{result} has no type")
                known.add(result)
    for output in graph.outputs:
        _require(output.value in known, 2, f"{graph.name} returns {output.value}, which nothing defines")


def _verify_constants(node: str, argument: Argument) -> None:
    if isinstance(argument, TorchConstant):
        permitted = argument.name in TORCH_CONSTANTS.get(argument.kind, ())
        _require(permitted, 3, f"node {node} takes the {argument.kind} {argument.name}, which is not permitted")
    elif isinstance(argument, tuple):
        for item in argument:
            _verify_constants(node, item)


def _verify_sections(graph: Graph) -> None:
    stop = 0
    for index, section in enumerate(graph.sections):
        _require(section.index == index, 4, f"section {section.name} is numbered {section.index}, not {index}")
        _require(
            section.start == stop and section.stop > stop, 4, f"section {index} covers {section.start}:{section.stop}"
        )
        stop = section.stop
    _require(stop == len(graph.nodes), 4, f"sections of {graph.name} cover {stop} of {len(graph.nodes)} nodes")


_SECTION_KINDS = {
    "comm.reduce_scatter": SectionKind.REDUCE,
    "opt.square_sums": SectionKind.GRADNORM,
    "comm.all_gather": SectionKind.GATHER,
}
"""By operator on groups: the kind of its section. All others are optimizers."""


def _verify_updates(graph: Graph, program: Program) -> None:
    """What works on groups. See `dataflow` for what each of these operators reads and writes."""
    groups = {group.name for group in program.groups}
    in_pass, update = pass_and_update(graph)
    kinds = [section.kind for section in in_pass]
    forward = kinds.count(SectionKind.FWD)
    ordered = kinds == [SectionKind.FWD] * forward + [SectionKind.BCKWD] * (len(kinds) - forward)
    _require(ordered, 13, f"the sections of a pass of {graph.name} are {', '.join(kinds)}, not FWD and then BCKWD")
    for section in graph.sections:
        if graph is not program.training:
            _require(section.kind is SectionKind.FWD, 13, f"{graph.name} has a section of kind {section.kind}")
        for node in graph.section_nodes(section):
            axis = axis_of(node)
            is_communication = OPERATORS[node.operator].kind is OperatorKind.COLLECTIVE
            known = axis in {one.name for one in program.mesh} or not is_communication
            _require(known, 10, f"{node.name} communicates along {axis}, which is no axis of the mesh")
            named, kind = groups_of(node), _SECTION_KINDS.get(node.operator, SectionKind.OPT)
            if node.operator == "comm.copy":
                kind = _kind_of_copy(node, program)
            elif not named:
                plain = section not in update or not node.operator.startswith("aten.")
                _require(plain, 13, f"{section.kind} section {section.index} holds {node.operator}")
                continue
            _require(section.kind is kind, 13, f"{node.operator} is in a section of kind {section.kind}")
            _require(groups.issuperset(named), 13, f"{node.name} names {', '.join(named)}: not all are groups")


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


_NORM_OPERATORS = ("opt.square_sums", "opt.total_norm")


def _verify_norm(program: Program, training: Graph) -> None:
    """The chain from the squares of all gradients to every optimizer, if gradients are clipped."""
    groups = tuple(group.name for group in program.groups)
    by_operator = {one: [node for node in training.nodes if node.operator == one] for one in _NORM_OPERATORS}
    updates = [node for node in training.nodes if node.operator in {f"opt.{one.kind}" for one in program.optimizers}]
    squares, norms = by_operator.values()
    reached = 0
    for member in sorted((one for group in program.groups for one in group.members), key=lambda one: one.block):
        _require(
            member.block == reached, 11, f"the blocks of {member.parameter} begin at {member.block}, not {reached}"
        )
        reached += member.blocks
    if squares:
        count = training.values[squares[0].results[0] or ""].numel
        _require(count == reached, 11, f"{squares[0].name} has {count} sums for {reached} blocks")
    scales = any(argument.name == LOSS_SCALE for argument in program.runtime_arguments)
    unscales = bool(norms) and all(map(is_narrow, program.groups))
    _require(unscales or not scales, 11, "the loss is scaled, and gradients are not all checked and unscaled")
    _require(len(squares) == len(norms) <= 1, 11, f"{len(squares)} nodes sum squares for {len(norms)} norms")
    operands: tuple[Ref, ...] = ()
    if squares and norms:
        _require(squares[0].args == (groups,), 11, f"{squares[0].name} does not sum the squares of all groups")
        expected = squares[0].results[0]
        left = {axis.name for axis in program.mesh}
        while left:
            along = [node for node in training.nodes if tuple(node_references(node)) == (expected,)]
            axis = axis_of(along[0]) if len(along) == 1 else None
            summed = axis in left and along[0].operator == "comm.all_reduce"
            right = summed and dict(along[0].kwargs) == {"axis": axis, "op": "sum", "order": "tree"}
            _require(right, 11, f"the squares of {squares[0].name} are not summed once over the axis {min(left)}")
            left.discard(axis or "")
            expected = along[0].results[0]
        _require(norms[0].args == (Ref(expected or ""),), 11, f"{norms[0].name} is not the norm of all gradients")
        operands = (Ref(norms[0].results[0] or ""),)
    for node in updates:
        _require(node.args[1:] == operands, 11, f"{node.name} clips otherwise than the other optimizers")


_ALONG_DP = {"axis": DATA_PARALLEL, "order": "tree"}


def _verify_order(program: Program, training: Graph) -> None:
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
                _require(ordered, 5, f"{node.name} is too early in section {section.index}, or there twice")
                reached[group] = (place, section.index)


def _verify_pipeline(program: Program) -> None:
    schedule, ranks = program.schedule, pipeline_ranks(program)
    _require((schedule is None) == all(axis.name != PIPELINE for axis in program.mesh), 16, "a pipeline has a schedule")
    if schedule is None:
        return
    _require(schedule.ranks == ranks, 16, f"the schedule is for {schedule.ranks} ranks, and the axis pp has {ranks}")
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
        _require(order == sorted(order), 16, f"the sections of {graph.name} are not in the order of stages")
        for section in in_pass:
            rank = section.stage % ranks
            _require(0 <= section.stage < schedule.stages, 16, f"section {section.index} is of stage {section.stage}")
            for node in graph.section_nodes(section):
                for name in node_references(node):
                    _require(made.get(name, rank) == rank, 16, f"{node.name} reads {name}, which another rank makes")
                made.update((name, rank) for name in node.results if name is not None)
                if axis_of(node) != PIPELINE:
                    continue
                given = dict(node.kwargs)
                peer, tag = (rank + _whole(given.get("shift"))) % ranks, _whole(given.get("tag"))
                _require(0 <= tag <= _LARGEST_TAG, 16, f"{node.name} has the tag {tag}")
                if node.operator == "comm.send":
                    names = list(node_references(node))
                    _require(len(names) == 1 and (peer, tag) not in tags, 16, f"{node.name} sends {len(names)} values")
                    tags.add((peer, tag))
                    messages[peer, tag] = graph.values.get(names[0]) or program.symbols[names[0]].type
                elif node.operator == "comm.recv":
                    sent = messages.pop((rank, tag), None)
                    _require(
                        sent == graph.values[node.results[0] or ""], 16, f"nothing sends what {node.name} receives"
                    )
        _require(not messages, 16, f"nothing receives {len(messages)} messages of {graph.name}")


def _verify_copies(program: Program) -> None:
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
            _require(alone and not more, 16, f"{member.parameter} is read on the ranks {sorted({source, *others})}")
            for symbol, ends in ((member.gradient, (source, target)), (member.parameter, (target, source))):
                node = copies.get(symbol)
                right = node is not None and groups_of(node) == (group.name,) and ends_of(node) == ends
                _require(right, 16, f"{symbol} is not copied from rank {ends[0]} to rank {ends[1]}")
                expected.append(symbol)
    _require(sorted(copies) == sorted(expected), 16, f"the update copies {sorted(copies)}, not {sorted(expected)}")
    for node in copies.values():
        tag = _whole(dict(node.kwargs).get("tag"))
        _require(0 <= tag <= _LARGEST_TAG, 16, f"{node.name} has the tag {tag}")


_LARGEST_TAG = 30_000
"""MPI has tags up to 32,767 everywhere."""


def _whole(argument: Argument) -> int:
    if isinstance(argument, int):
        return argument
    raise InvariantError(16, f"a message with the shift or tag {argument!r}")


_KEEPERS = (SymbolKind.OUTPUT, SymbolKind.GRADIENT, SymbolKind.BUFFER)


def _verify_outputs(graph: Graph, program: Program) -> None:
    for output in graph.outputs:
        symbol = _symbol(
            output.symbol, program, 2, f"{graph.name} keeps {output.value} in {output.symbol}, which is no symbol"
        )
        _require(symbol.kind in _KEEPERS, 15, f"{graph.name} keeps {output.value} in {symbol.name}, a {symbol.kind}")
        kept = graph.values.get(output.value) or program.symbols[output.value].type
        # The evaluation graph at batch 1 has the same output symbols, at another batch size.
        if symbol.kind is not SymbolKind.OUTPUT:
            _require(kept == symbol.type, 6, f"{output.value} is {kept}, but {symbol.name} is {symbol.type}")


def _verify_memory(program: Program) -> None:
    # Members of a group are aligned to 64 elements by invariant 8; everything else to whole addresses.
    members = frozenset(name for group in program.groups for name in _names_of(group, program))
    for held in symbols_of_ranks(program):
        _verify_places(program, [one for name, one in program.symbols.items() if name in held], members)


def _verify_places(program: Program, symbols: Iterable[Symbol], members: Collection[str]) -> None:
    """The symbols in the memory of one rank."""
    spans = []
    for symbol in symbols:
        kept = symbol.kind not in (SymbolKind.OUTPUT, SymbolKind.TANGENT)
        where = f"{symbol.name} lies at {symbol.offset}"
        _require((symbol.offset is not None) == kept, 7, f"{where}, and is of kind {symbol.kind}")
        if symbol.offset is None:
            continue
        _require(symbol.offset >= 0, 7, where)
        end = symbol.offset + symbol.type.size_bytes
        _require(end <= program.device_bytes, 7, f"{symbol.name} ends at {end}, past the device's memory")
        if symbol.kind is SymbolKind.ACCUMULATION_GROUP:
            continue  # it wraps gradients
        _require(symbol.name in members or symbol.offset % ALIGNMENT_BYTES == 0, 7, f"{where}, which is not aligned")
        if symbol.type.size_bytes:
            spans.append((symbol.offset, end, symbol.name))
    for (_, end, before), (start, _, after) in pairwise(sorted(spans, key=itemgetter(0))):
        _require(end <= start, 7, f"{before} and {after} overlap in device memory")


def _names_of(group: ParameterGroup, program: Program) -> Iterable[str]:
    for member in group.members:
        yield from program.optimizers[group.optimizer].symbols_of(member).values()


def _verify_group(group: ParameterGroup, program: Program) -> None:
    _require(group.numel % ALIGNMENT_ELEMENTS == 0, 8, f"{group.name} has {group.numel} elements")
    _require(group.dtype in DTYPE_BYTES, 12, f"{group.name} has the unknown dtype {group.dtype!r}")
    types = {region: group.region_type(region) for region in group.regions}
    optimizer = program.optimizers[group.optimizer]
    states = "float32" if MASTER in optimizer.states else None
    _require(group.state_dtype == states, 12, f"{group.name} has states of {group.state_dtype!r}, not of {states!r}")
    _require(states is None or is_narrow(group), 12, f"{group.name} of {group.dtype} has master weights")
    _require(set(group.regions) == set(optimizer.regions), 8, f"{group.name} has the regions {sorted(group.regions)}")
    for region, offset in group.regions.items():
        end = offset + types[region].size_bytes
        inside = offset >= 0 and offset % ALIGNMENT_BYTES == 0 and end <= program.device_bytes
        _require(inside, 7, f"region {region} of {group.name} lies at {offset}, up to {end}")
    reached = 0
    for member in group.members:
        follows = member.start % ALIGNMENT_ELEMENTS == 0 and member.start >= reached
        _require(follows, 8, f"{member.parameter} starts at {member.start}")
        reached = member.start + member.numel
        _require(member.numel >= 0 and reached <= group.numel, 8, f"{member.parameter} ends past its group")
        for region, name in optimizer.symbols_of(member).items():
            symbol = _symbol(name, program, 8, f"{group.name} names {name}, which is no symbol")
            dtype = types[region].dtype
            address = group.regions[region] + member.start * DTYPE_BYTES[dtype]
            _require(symbol.offset == address, 8, f"{name} lies at {symbol.offset}, its group says {address}")
            fits = symbol.type.dtype == dtype and symbol.type.numel == member.numel
            _require(fits, 6, f"{name} is {symbol.type}, its group says {dtype} × {member.numel}")
        gradient, parameter = program.symbols[member.gradient], program.symbols[member.parameter]
        _require(gradient.type == parameter.type, 6, f"{gradient.name} is {gradient.type}, not {parameter.type}")


def is_narrow(group: ParameterGroup) -> bool:
    return group.dtype in ("float16", "bfloat16")


def _verify_ownership(program: Program) -> None:
    names = [group.name for group in program.groups]
    _require(len(names) == len(set(names)), 9, f"groups share a name: {names}")
    for optimizer in program.optimizers:
        _require(f"opt.{optimizer.kind}" in OPERATORS, 3, f"the optimizer {optimizer.kind} is not permitted")
    for group in program.groups:
        _require(0 <= group.optimizer < len(program.optimizers), 8, f"{group.name} has no optimizer {group.optimizer}")
    members = [member for group in program.groups for member in group.members]
    for member in members:
        for name, kind in ((member.parameter, SymbolKind.PARAMETER), (member.gradient, SymbolKind.GRADIENT)):
            symbol = program.symbols.get(name)
            _require(symbol is not None and symbol.kind is kind, 9, f"{name} is no {kind}")
    parameters = [member.parameter for member in members]
    _require(len(parameters) == len(set(parameters)), 9, "a parameter is in two groups")
    owners = [name for group in program.groups for name in _names_of(group, program) if name not in set(parameters)]
    owned = set(owners)
    _require(len(owners) == len(owned), 9, "a gradient or optimizer state is in two groups")
    for symbol in program.symbols.values():
        if symbol.kind in (SymbolKind.GRADIENT, SymbolKind.OPTIMIZER_STATE):
            _require(symbol.name in owned, 9, f"{symbol.name} is in no group")


def _verify_data_parallel(program: Program) -> None:
    parallel = program.data_parallel
    axes = [axis.name for axis in program.mesh]
    _require(len(axes) == len(set(axes)), 10, f"the mesh has an axis twice: {', '.join(axes)}")
    for axis in program.mesh:
        _require(axis.size >= 1, 10, f"the axis {axis.name} has the size {axis.size}")
        fits = axis.chips == 1 or (axis.name == DATA_PARALLEL and axis.chips > 1 and axis.size % axis.chips == 0)
        _require(fits, 10, f"the axis {axis.name} has {axis.size} ranks, and {axis.chips} chips a replica")
        several = axis.name == DATA_PARALLEL and axis.size > axis.chips
        _require(axis.at_run_time or not several, 10, f"the axis {axis.name} has a fixed number of replicas")
    _require((DATA_PARALLEL in axes) == (parallel is not None), 10, "the axis dp goes with gradient groups")
    if parallel is None:
        return
    training = program.training
    if training is None:
        raise InvariantError(10, "gradient groups without a training step")
    for operator, keywords in (
        ("comm.reduce_scatter", _ALONG_DP | {"op": "mean"}),
        ("comm.all_gather", {"axis": DATA_PARALLEL}),
    ):
        places = [
            (section.index, node)
            for section in training.sections
            for node in training.section_nodes(section)
            if node.operator == operator and groups_of(node)
        ]
        right = all(dict(node.kwargs) == keywords for _, node in places)
        _require(right, 10, f"{operator} of groups must have {keywords}")
        _require(len({index for index, _ in places}) == 1, 10, f"{operator} of groups is not in one section")
        done = sorted(name for _, node in places for name in groups_of(node))
        _require(done == sorted(group.name for group in program.groups), 10, f"{operator} is not there for each group")
    _require([g.group for g in parallel.gradient_groups] == [g.name for g in program.groups], 10, "groups do not match")
    for gradient_group, group in zip(parallel.gradient_groups, program.groups, strict=True):
        otherwise = f"{gradient_group.symbol} does not wrap the gradients of {group.name}"
        wrapper = _symbol(gradient_group.symbol, program, 10, otherwise)
        _require((wrapper.offset, wrapper.type.numel) == (group.regions["gradient"], group.numel), 10, otherwise)
    buffer = program.symbols.get(parallel.reduce_buffer)
    needed = max((group.numel * DTYPE_BYTES[group.dtype] for group in program.groups), default=0)
    holds = buffer is not None and buffer.offset is not None and buffer.type.size_bytes >= needed
    _require(holds, 10, f"the reduce buffer {parallel.reduce_buffer} does not hold {needed} bytes")


def _verify_training(program: Program) -> None:
    if program.training is None:
        _require(not program.groups, 11, "a program without a training step has parameter groups")
        return
    loss = program.symbols.get(program.loss or "")
    inputs = [program.symbols[name] for name in program.training.inputs]
    types = [symbol.type for symbol in inputs if symbol.kind is SymbolKind.TANGENT]
    _require(bool(types), 11, "the training step has no tangent")
    fits = loss is not None and loss.type in types
    _require(fits, 11, f"no tangent is of the type of the loss: {', '.join(map(str, types))}")
    returned = [output.symbol for output in program.training.outputs]
    _require(len(returned) == len(set(returned)), 11, "two outputs of the training step are kept in one symbol")
    _require(program.loss in returned, 11, f"the training step does not return {program.loss}")
    for group in program.groups:
        for member in group.members:
            _require(member.gradient in returned, 11, f"the training step does not return {member.gradient}")
    kinds = {f"opt.{optimizer.kind}" for optimizer in program.optimizers}
    updated = [name for node in program.training.nodes if node.operator in kinds for name in groups_of(node)]
    _require(updated == [group.name for group in program.groups], 11, f"the optimizer nodes update {updated}")
    _verify_order(program, program.training)
    _verify_norm(program, program.training)
