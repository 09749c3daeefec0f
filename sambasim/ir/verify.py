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
        GATHER section gathers every group; each has a wrapper, and fits into the reduce buffer. Without the axis there
        is none of these, and no ZeRO. Its size is a multiple of the chips of a replica, and one replica unless a run
        chooses, and a mesh has at most 16,384 ranks. Communication names an axis of the mesh, and what is cut has a
        part for each rank on one
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
    17  every parameter has a name in the state_dict of its model, and no name there is that of two symbols
    18  an argument is one number, int64 or float32
    19  an optimizer of the user's own, and no other, has an update: element-wise operators on parts of its regions, and
        arithmetic of hyperparameters and the number of the step, which give the parameter and states
    20  all optimizers keep averages or none does; that of a buffer is a buffer like it, of at least 32 bits
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from operator import itemgetter

from sambasim.errors import LARGEST_BYTES, InvariantError
from sambasim.ir import verify_training as steps
from sambasim.ir.dataflow import groups_of
from sambasim.ir.graph import TORCH_CONSTANTS, Graph, Node, TorchConstant, leaves
from sambasim.ir.operators import ELEMENTWISE, NUMBERS, OPERATORS, OperatorKind
from sambasim.ir.program import AVERAGE, EMA_PREFIX, MASTER, STEP, ParameterGroup, Program, dtype_of_average
from sambasim.ir.ranks import of_ranks
from sambasim.ir.types import (
    ALIGNMENT_BYTES,
    ALIGNMENT_ELEMENTS,
    DTYPE_BYTES,
    HIGHEST_RANK,
    NUMBER,
    PART,
    VALUE_BYTES,
    Cut,
    SymbolKind,
    TensorType,
    whole_type,
)
from sambasim.ir.verify_training import require
from sambasim.optimizers import OWN


class Progress(IntEnum):
    """How far the compiler is with a program."""

    CAPTURED = 0
    OPTIMIZED = 1  # the optimizer is attached, parameters are in groups
    PLACED = 2  # every symbol has its address in device memory


def verify(program: Program, stage: Progress = Progress.PLACED) -> None:
    """Raises InvariantError, with the number of the first invariant that `program` breaks."""
    for begins, rules in _RULES.items():
        for rule in rules if stage >= begins else ():
            rule(program)


def _types(program: Program) -> None:
    axes = {(axis.name, axis.size) for axis in program.mesh if not axis.at_run_time}
    require(program.batch_size >= 1, 12, f"the batch size is {program.batch_size}")
    for name, symbol in program.symbols.items():
        require(name == symbol.name, 1, f"symbol {symbol.name} is filed under {name}")
        shape = symbol.type.shape
        _type(name, symbol.type, DTYPE_BYTES)
        for cut in symbol.cuts:
            fits = 0 <= cut.dim < len(shape) and cut.outer >= 1 and shape[cut.dim] % cut.outer == 0
            require(fits and (cut.axis, cut.parts) in axes, 10, f"{name} is cut otherwise than the mesh: {cut}")
        _type(name, symbol.whole, DTYPE_BYTES)
        batched = symbol.kind is not SymbolKind.INPUT or shape[:1] == (program.batch_size,)
        require(batched, 14, f"{name} is {symbol.type}, but the batch size is {program.batch_size}")
        is_number = not shape and symbol.type.dtype in ("int64", "float32")
        require(is_number or symbol.kind is not SymbolKind.ARGUMENT, 18, f"the argument {name} is {symbol.type}")
    for name, type_ in (item for graph in (*program.graphs, *program.updates) for item in graph.values.items()):
        _type(name, type_, VALUE_BYTES)
    require(0 <= program.device_bytes <= LARGEST_BYTES, 12, f"device memory of {program.device_bytes} bytes")


def _type(name: str, type_: TensorType, dtypes: Mapping[str, int]) -> None:
    require(type_.dtype in dtypes, 12, f"{name} has the unknown dtype {type_.dtype!r}")
    require(len(type_.shape) <= HIGHEST_RANK, 12, f"{name} has {len(type_.shape)} dimensions")
    require(all(0 <= extent <= LARGEST_BYTES for extent in type_.shape), 12, f"{name} has the shape {type_.shape}")
    require(type_.size_bytes <= LARGEST_BYTES, 12, f"{name} would need {type_.size_bytes} bytes")


def _names(program: Program) -> None:
    held: dict[str, str] = {}
    for symbol in program.symbols.values():
        named = symbol.kind is not SymbolKind.PARAMETER or bool(symbol.torch_names)
        require(named, 17, f"the parameter {symbol.name} has no name in the state_dict")
        for name in symbol.torch_names:
            require(name not in held, 17, f"{name} is the name of {held.get(name)} and of {symbol.name}")
            held[name] = symbol.name


_PERMITTED = frozenset(name for name, operator in OPERATORS.items() if operator.kind is not OperatorKind.MEMORY)


def _values(program: Program) -> None:
    for graph in program.graphs:
        _defined(graph, program.symbols, _PERMITTED)


def _defined(graph: Graph, symbols: Collection[str], operators: Collection[str]) -> None:
    known = set(graph.inputs)
    for name in graph.inputs:
        require(name in symbols, 2, f"{graph.name} takes in {name}, which is no symbol")
    for node in graph.nodes:
        require(node.operator in operators, 3, f"node {node.name} is {node.operator}, which is not permitted")
        for constant in leaves((node.args, node.kwargs)):
            if isinstance(constant, TorchConstant):
                said = f"node {node.name} takes the {constant.kind} {constant.name}, which is not permitted"
                require(constant.name in TORCH_CONSTANTS.get(constant.kind, ()), 3, said)
        for name in node.reads:
            require(name in known, 2, f"node {node.name} reads {name}, which nothing before it defines")
        for result in node.makes:
            require(result not in known and result not in symbols, 1, f"{result} is defined twice")
            require(result in graph.values, 1, f"{result} has no type")
            known.add(result)
    for output in graph.outputs:
        require(output.value in known, 2, f"{graph.name} returns {output.value}, which nothing defines")


def _updates(program: Program) -> None:
    arguments = {argument.name for argument in program.runtime_arguments}
    for optimizer in program.optimizers:
        graph, its = optimizer.update, f"the update of {optimizer.name}"
        require((graph is not None) == (optimizer.kind == OWN), 19, f"{its} does not fit to its kind, {optimizer.kind}")
        if graph is not None:
            regions = {*optimizer.regions} - {MASTER, AVERAGE}
            numbers = [name for name in graph.inputs if name not in regions]
            known = all(name == STEP or f"{optimizer.name}__{name}" in arguments for name in numbers)
            require(known, 19, f"{its} takes in {', '.join(numbers)}")
            _defined(graph, {*regions, *numbers}, ELEMENTWISE | NUMBERS)
            types = {**dict.fromkeys(regions, PART), **dict.fromkeys(numbers, NUMBER), **graph.values}
            for node in graph.nodes:
                of_numbers = all(types[name] == NUMBER for name in node.reads) and int not in map(type, node.args)
                gives = [types[name] for name in node.makes]
                fits = len(gives) == len(node.results) == 1 and gives[0].shape in (PART.shape, ())
                of_numbers = of_numbers or node.operator not in NUMBERS
                require(fits and of_numbers, 19, f"{node.name} of {its} is neither of parts nor of numbers")
            written = Counter(output.symbol for output in graph.outputs)
            right = written.keys() <= regions - {"gradient"} and {written["parameter"], *written.values()} == {1}
            right = right and all(graph.values.get(output.value) == PART for output in graph.outputs)
            require(right, 19, f"{its} writes {', '.join(written)}")
    kept = {AVERAGE in optimizer.states for optimizer in program.optimizers}
    averages = any(name.startswith(EMA_PREFIX) for name in arguments)
    require(kept <= {averages}, 20, "averages that some optimizers do not keep, or that have no runtime arguments")
    for name, average in program.buffer_averages.items():
        of, symbol = program.symbols[name], program.symbols[average]
        fits = symbol.type == TensorType(dtype_of_average(of.type.dtype), of.type.shape) and symbol.cuts == of.cuts
        require(fits and of.kind is symbol.kind is SymbolKind.BUFFER, 20, f"{average} is {symbol.type} {symbol.kind}")


_OF_PARTS = ("comm.shard", "comm.reduce_scatter", "comm.all_gather")


def _parts(program: Program) -> None:
    """Nodes that cut a value into the parts of ranks, or join them."""
    sizes = {axis.name: axis.size for axis in program.mesh}
    for graph in program.graphs:
        types = {**{name: program.symbols[name].type for name in graph.inputs}, **graph.values}
        for node in graph.nodes:
            if node.operator in _OF_PARTS and not groups_of(node):
                cut = _cut(node, sizes)
                types_here = [types[name] for name in (*node.reads, *node.makes)]
                require(len(types_here) == 2, 10, f"{node.name} is of {len(types_here)} values")
                part, whole = types_here if node.operator == "comm.all_gather" else reversed(types_here)
                fits = 0 <= cut.dim < len(part.shape) and cut.outer >= 1 and part.shape[cut.dim] % cut.outer == 0
                require(fits and whole_type(part, [cut]) == whole, 10, f"{node.name} cuts {whole} to {part} by {cut}")


def _cut(node: Node, sizes: Mapping[str, int]) -> Cut:
    match {"outer": 1, **dict(node.kwargs)}:
        case {"axis": str(axis), "dim": int(dim), "outer": int(outer)} if axis in sizes:
            return Cut(axis, dim, sizes[axis], outer)
    raise InvariantError(10, f"{node.name} cuts along {dict(node.kwargs)}")


def _sections(program: Program) -> None:
    for graph in program.graphs:
        stop = 0
        for index, section in enumerate(graph.sections):
            require(section.index == index, 4, f"section {section.name} is numbered {section.index}, not {index}")
            require(section.start == stop < section.stop, 4, f"section {index} covers {section.start}:{section.stop}")
            stop = section.stop
        require(stop == len(graph.nodes), 4, f"sections of {graph.name} cover {stop} of {len(graph.nodes)} nodes")


_KEEPERS = (SymbolKind.OUTPUT, SymbolKind.GRADIENT, SymbolKind.BUFFER)


def _outputs(program: Program) -> None:
    for graph in program.graphs:
        for output in graph.outputs:
            keeps = f"{graph.name} keeps {output.value} in {output.symbol}"
            require(output.symbol in program.symbols, 2, f"{keeps}, which is no symbol")
            symbol = program.symbols[output.symbol]
            require(symbol.kind in _KEEPERS, 15, f"{keeps}, a {symbol.kind}")
            kept = graph.values.get(output.value) or program.symbols[output.value].type
            # The evaluation graph at batch 1 has the same output symbols, at another batch size.
            fits = symbol.kind is SymbolKind.OUTPUT or kept == symbol.type
            require(fits, 6, f"{output.value} is {kept}, but {symbol.name} is {symbol.type}")


def _ownership(program: Program) -> None:
    names = [group.name for group in program.groups]
    require(len(names) == len(set(names)), 9, f"groups share a name: {names}")
    for optimizer in program.optimizers:
        require(f"opt.{optimizer.kind}" in OPERATORS, 3, f"the optimizer {optimizer.kind} is not permitted")
    owned: set[str] = set()
    for group in program.groups:
        require(0 <= group.optimizer < len(program.optimizers), 8, f"{group.name} has no optimizer {group.optimizer}")
        for member in group.members:
            for name, kind in ((member.parameter, SymbolKind.PARAMETER), (member.gradient, SymbolKind.GRADIENT)):
                require(name in program.symbols and program.symbols[name].kind is kind, 9, f"{name} is no {kind}")
        for name in program.symbols_of(group):
            require(name not in owned, 9, f"{name} is in two groups, or twice in one")
            owned.add(name)
    for symbol in program.symbols.values():
        free = symbol.kind not in (SymbolKind.GRADIENT, SymbolKind.OPTIMIZER_STATE) or symbol.name in owned
        require(free, 9, f"{symbol.name} is in no group")


def _memory(program: Program) -> None:
    # Members of a group are aligned to 64 elements by invariant 8; everything else to whole addresses.
    members = {name for group in program.groups for name in program.symbols_of(group)}
    for symbol in program.symbols.values():
        kept = symbol.kind not in (SymbolKind.OUTPUT, SymbolKind.TANGENT)
        where = f"{symbol.name} lies at {symbol.offset}"
        require((symbol.offset is not None) == kept, 7, f"{where}, and is of kind {symbol.kind}")
        if symbol.offset is not None:
            require(symbol.offset >= 0, 7, where)
            end = symbol.offset + symbol.type.size_bytes
            require(end <= program.device_bytes, 7, f"{symbol.name} ends at {end}, past the device's memory")
            free = symbol.name in members or symbol.kind is SymbolKind.ACCUMULATION_GROUP
            require(free or symbol.offset % ALIGNMENT_BYTES == 0, 7, f"{where}, which is not aligned")
    for part in of_ranks(program):
        spans = [
            (symbol.offset, symbol.offset + symbol.type.size_bytes, name)
            for name, symbol in part.symbols.items()
            if symbol.offset is not None and symbol.type.size_bytes
            if symbol.kind is not SymbolKind.ACCUMULATION_GROUP  # it wraps gradients
        ]
        for (_, end, before), (start, _, after) in pairwise(sorted(spans, key=itemgetter(0))):
            require(end <= start, 7, f"{before} and {after} overlap in device memory")


def _group(group: ParameterGroup, program: Program) -> None:
    require(group.numel % ALIGNMENT_ELEMENTS == 0, 8, f"{group.name} has {group.numel} elements")
    require(group.dtype in DTYPE_BYTES, 12, f"{group.name} has the unknown dtype {group.dtype!r}")
    types = {region: group.region_type(region) for region in group.regions}
    optimizer = program.optimizers[group.optimizer]
    states = "float32" if MASTER in optimizer.states else None
    require(group.state_dtype == states, 12, f"{group.name} has states of {group.state_dtype!r}, not of {states!r}")
    narrow = group.dtype in ("float16", "bfloat16")
    require(states is None or narrow, 12, f"{group.name} of {group.dtype} has master weights")
    require(set(group.regions) == set(optimizer.regions), 8, f"{group.name} has the regions {sorted(group.regions)}")
    for region, offset in group.regions.items():
        end = offset + types[region].size_bytes
        inside = offset >= 0 and offset % ALIGNMENT_BYTES == 0 and end <= program.device_bytes
        require(inside, 7, f"region {region} of {group.name} lies at {offset}, up to {end}")
    reached = 0
    for member in group.members:
        follows = member.start % ALIGNMENT_ELEMENTS == 0 and member.start >= reached
        require(follows, 8, f"{member.parameter} starts at {member.start}")
        reached = member.start + member.numel
        require(member.numel >= 0 and reached <= group.numel, 8, f"{member.parameter} ends past its group")
        for region, name in optimizer.symbols_of(member).items():
            require(name in program.symbols, 8, f"{group.name} names {name}, which is no symbol")
            symbol, dtype = program.symbols[name], types[region].dtype
            address = group.regions[region] + member.start * DTYPE_BYTES[dtype]
            require(symbol.offset == address, 8, f"{name} lies at {symbol.offset}, its group says {address}")
            fits = symbol.type.dtype == dtype and symbol.type.numel == member.numel
            require(fits, 6, f"{name} is {symbol.type}, its group says {dtype} × {member.numel}")
        gradient, parameter = program.symbols[member.gradient], program.symbols[member.parameter]
        require(gradient.type == parameter.type, 6, f"{gradient.name} is {gradient.type}, not {parameter.type}")


def _groups(program: Program) -> None:
    for group in program.groups:
        _group(group, program)


_RULES: Mapping[Progress, Sequence[Callable[[Program], None]]] = {
    Progress.CAPTURED: (_types, _names, _values, _parts, _sections, _outputs, steps.sections_of_groups, steps.pipeline),
    Progress.OPTIMIZED: (_ownership, _updates, steps.training_step, steps.copies),
    Progress.PLACED: (_memory, _groups, steps.data_parallel),
}
"""By how far a program is, what holds from then on, in an order in which each rule may assume those before."""
