"""Values, types, sections and outputs: invariants 1 to 4, 6, 12, 14, 15 and 17; parameter groups and their places in
device memory: invariants 7 to 10."""

from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise
from operator import itemgetter

from sambasim.errors import InvariantError
from sambasim.ir.dataflow import groups_of
from sambasim.ir.graph import TORCH_CONSTANTS, Argument, Graph, TorchConstant
from sambasim.ir.mesh import DATA_PARALLEL
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import MASTER, ParameterGroup, Program
from sambasim.ir.stages import symbols_of_ranks
from sambasim.ir.types import (
    ALIGNMENT_BYTES,
    ALIGNMENT_ELEMENTS,
    DTYPE_BYTES,
    VALUE_BYTES,
    Symbol,
    SymbolKind,
    TensorType,
)

LARGEST_BYTES = 1 << 46
"""64 TiB: more than any machine that we know of has, and far from where arithmetic on sizes could overflow."""

HIGHEST_RANK = 64
"""Dimensions of a tensor; torch's own limit. It keeps the products of shapes in a file from becoming astronomical."""


def require(condition: bool, number: int, what: str) -> None:
    if not condition:
        raise InvariantError(number, what)


def symbol_of(name: str, program: Program, number: int, otherwise: str) -> Symbol:
    symbol = program.symbols.get(name)
    if symbol is None:
        raise InvariantError(number, otherwise)
    return symbol


def verify_types(program: Program) -> None:
    def check(name: str, type_: TensorType, dtypes: Mapping[str, int] = DTYPE_BYTES) -> None:
        require(type_.dtype in dtypes, 12, f"{name} has the unknown dtype {type_.dtype!r}")
        require(len(type_.shape) <= HIGHEST_RANK, 12, f"{name} has {len(type_.shape)} dimensions")
        require(all(0 <= extent <= LARGEST_BYTES for extent in type_.shape), 12, f"{name} has the shape {type_.shape}")
        require(type_.size_bytes <= LARGEST_BYTES, 12, f"{name} would need {type_.size_bytes} bytes")

    axes = {(axis.name, axis.size) for axis in program.mesh if not axis.at_run_time}
    for name, symbol in program.symbols.items():
        require(name == symbol.name, 1, f"symbol {symbol.name} is filed under {name}")
        check(name, symbol.type)
        for cut in symbol.cuts:
            exists = 0 <= cut.dim < len(symbol.type.shape) and cut.outer >= 1
            fits = exists and symbol.type.shape[cut.dim] % cut.outer == 0
            require(fits and (cut.axis, cut.parts) in axes, 10, f"{name} is cut otherwise than the mesh: {cut}")
        check(name, symbol.whole)
    for graph in program.graphs:
        for name, type_ in graph.values.items():
            check(name, type_, VALUE_BYTES)
    require(program.batch_size >= 1, 12, f"the batch size is {program.batch_size}")
    for symbol in program.symbols.values():
        batched = symbol.kind is not SymbolKind.INPUT or symbol.type.shape[:1] == (program.batch_size,)
        require(batched, 14, f"{symbol.name} is {symbol.type}, but the batch size is {program.batch_size}")
    require(0 <= program.device_bytes <= LARGEST_BYTES, 12, f"device memory of {program.device_bytes} bytes")


def verify_names(program: Program) -> None:
    held: dict[str, str] = {}
    for symbol in program.symbols.values():
        named = symbol.kind is not SymbolKind.PARAMETER or bool(symbol.torch_names)
        require(named, 17, f"the parameter {symbol.name} has no name in the state_dict")
        for name in symbol.torch_names:
            require(name not in held, 17, f"{name} is the name of {held.get(name)} and of {symbol.name}")
            held[name] = symbol.name


def verify_values(graph: Graph, program: Program) -> None:
    known = set(graph.inputs)
    for name in graph.inputs:
        require(name in program.symbols, 2, f"{graph.name} takes in {name}, which is no symbol")
    for node in graph.nodes:
        permitted = node.operator in OPERATORS and OPERATORS[node.operator].kind is not OperatorKind.MEMORY
        require(permitted, 3, f"node {node.name} is {node.operator}, which is not permitted")
        _verify_constants(node.name, node.args)
        _verify_constants(node.name, node.kwargs)
        for name in node.reads:
            require(name in known, 2, f"node {node.name} reads {name}, which nothing before it defines")
        for result in node.results:
            if result is not None:
                require(result not in known and result not in program.symbols, 1, f"{result} is defined twice")
                require(result in graph.values, 1, f"{result} has no type")
                known.add(result)
    for output in graph.outputs:
        require(output.value in known, 2, f"{graph.name} returns {output.value}, which nothing defines")


def _verify_constants(node: str, argument: Argument) -> None:
    if isinstance(argument, TorchConstant):
        permitted = argument.name in TORCH_CONSTANTS.get(argument.kind, ())
        require(permitted, 3, f"node {node} takes the {argument.kind} {argument.name}, which is not permitted")
    elif isinstance(argument, tuple):
        for item in argument:
            _verify_constants(node, item)


def verify_sections(graph: Graph) -> None:
    stop = 0
    for index, section in enumerate(graph.sections):
        require(section.index == index, 4, f"section {section.name} is numbered {section.index}, not {index}")
        require(
            section.start == stop and section.stop > stop, 4, f"section {index} covers {section.start}:{section.stop}"
        )
        stop = section.stop
    require(stop == len(graph.nodes), 4, f"sections of {graph.name} cover {stop} of {len(graph.nodes)} nodes")


_KEEPERS = (SymbolKind.OUTPUT, SymbolKind.GRADIENT, SymbolKind.BUFFER)


def verify_outputs(graph: Graph, program: Program) -> None:
    for output in graph.outputs:
        symbol = symbol_of(
            output.symbol, program, 2, f"{graph.name} keeps {output.value} in {output.symbol}, which is no symbol"
        )
        require(symbol.kind in _KEEPERS, 15, f"{graph.name} keeps {output.value} in {symbol.name}, a {symbol.kind}")
        kept = graph.values.get(output.value) or program.symbols[output.value].type
        # The evaluation graph at batch 1 has the same output symbols, at another batch size.
        if symbol.kind is not SymbolKind.OUTPUT:
            require(kept == symbol.type, 6, f"{output.value} is {kept}, but {symbol.name} is {symbol.type}")


def verify_memory(program: Program) -> None:
    # Members of a group are aligned to 64 elements by invariant 8; everything else to whole addresses.
    members = frozenset(name for group in program.groups for name in names_of(group, program))
    for held in symbols_of_ranks(program):
        _verify_places(program, [one for name, one in program.symbols.items() if name in held], members)


def _verify_places(program: Program, symbols: Iterable[Symbol], members: Collection[str]) -> None:
    """The symbols in the memory of one rank."""
    spans = []
    for symbol in symbols:
        kept = symbol.kind not in (SymbolKind.OUTPUT, SymbolKind.TANGENT)
        where = f"{symbol.name} lies at {symbol.offset}"
        require((symbol.offset is not None) == kept, 7, f"{where}, and is of kind {symbol.kind}")
        if symbol.offset is None:
            continue
        require(symbol.offset >= 0, 7, where)
        end = symbol.offset + symbol.type.size_bytes
        require(end <= program.device_bytes, 7, f"{symbol.name} ends at {end}, past the device's memory")
        if symbol.kind is SymbolKind.ACCUMULATION_GROUP:
            continue  # it wraps gradients
        require(symbol.name in members or symbol.offset % ALIGNMENT_BYTES == 0, 7, f"{where}, which is not aligned")
        if symbol.type.size_bytes:
            spans.append((symbol.offset, end, symbol.name))
    for (_, end, before), (start, _, after) in pairwise(sorted(spans, key=itemgetter(0))):
        require(end <= start, 7, f"{before} and {after} overlap in device memory")


def names_of(group: ParameterGroup, program: Program) -> Iterable[str]:
    for member in group.members:
        yield from program.optimizers[group.optimizer].symbols_of(member).values()


def verify_group(group: ParameterGroup, program: Program) -> None:
    require(group.numel % ALIGNMENT_ELEMENTS == 0, 8, f"{group.name} has {group.numel} elements")
    require(group.dtype in DTYPE_BYTES, 12, f"{group.name} has the unknown dtype {group.dtype!r}")
    types = {region: group.region_type(region) for region in group.regions}
    optimizer = program.optimizers[group.optimizer]
    states = "float32" if MASTER in optimizer.states else None
    require(group.state_dtype == states, 12, f"{group.name} has states of {group.state_dtype!r}, not of {states!r}")
    require(states is None or is_narrow(group), 12, f"{group.name} of {group.dtype} has master weights")
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
            symbol = symbol_of(name, program, 8, f"{group.name} names {name}, which is no symbol")
            dtype = types[region].dtype
            address = group.regions[region] + member.start * DTYPE_BYTES[dtype]
            require(symbol.offset == address, 8, f"{name} lies at {symbol.offset}, its group says {address}")
            fits = symbol.type.dtype == dtype and symbol.type.numel == member.numel
            require(fits, 6, f"{name} is {symbol.type}, its group says {dtype} × {member.numel}")
        gradient, parameter = program.symbols[member.gradient], program.symbols[member.parameter]
        require(gradient.type == parameter.type, 6, f"{gradient.name} is {gradient.type}, not {parameter.type}")


def is_narrow(group: ParameterGroup) -> bool:
    return group.dtype in ("float16", "bfloat16")


def verify_ownership(program: Program) -> None:
    names = [group.name for group in program.groups]
    require(len(names) == len(set(names)), 9, f"groups share a name: {names}")
    for optimizer in program.optimizers:
        require(f"opt.{optimizer.kind}" in OPERATORS, 3, f"the optimizer {optimizer.kind} is not permitted")
    for group in program.groups:
        require(0 <= group.optimizer < len(program.optimizers), 8, f"{group.name} has no optimizer {group.optimizer}")
    members = [member for group in program.groups for member in group.members]
    for member in members:
        for name, kind in ((member.parameter, SymbolKind.PARAMETER), (member.gradient, SymbolKind.GRADIENT)):
            symbol = program.symbols.get(name)
            require(symbol is not None and symbol.kind is kind, 9, f"{name} is no {kind}")
    parameters = [member.parameter for member in members]
    require(len(parameters) == len(set(parameters)), 9, "a parameter is in two groups")
    owners = [name for group in program.groups for name in names_of(group, program) if name not in set(parameters)]
    owned = set(owners)
    require(len(owners) == len(owned), 9, "a gradient or optimizer state is in two groups")
    for symbol in program.symbols.values():
        if symbol.kind in (SymbolKind.GRADIENT, SymbolKind.OPTIMIZER_STATE):
            require(symbol.name in owned, 9, f"{symbol.name} is in no group")


_ALONG_DP = {"axis": DATA_PARALLEL, "order": "tree"}


def verify_data_parallel(program: Program) -> None:
    parallel = program.data_parallel
    axes = [axis.name for axis in program.mesh]
    require(len(axes) == len(set(axes)), 10, f"the mesh has an axis twice: {', '.join(axes)}")
    for axis in program.mesh:
        require(axis.size >= 1, 10, f"the axis {axis.name} has the size {axis.size}")
        fits = axis.chips == 1 or (axis.name == DATA_PARALLEL and axis.chips > 1 and axis.size % axis.chips == 0)
        require(fits, 10, f"the axis {axis.name} has {axis.size} ranks, and {axis.chips} chips a replica")
        several = axis.name == DATA_PARALLEL and axis.size > axis.chips
        require(axis.at_run_time or not several, 10, f"the axis {axis.name} has a fixed number of replicas")
    require((DATA_PARALLEL in axes) == (parallel is not None), 10, "the axis dp goes with gradient groups")
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
        require(right, 10, f"{operator} of groups must have {keywords}")
        require(len({index for index, _ in places}) == 1, 10, f"{operator} of groups is not in one section")
        done = sorted(name for _, node in places for name in groups_of(node))
        require(done == sorted(group.name for group in program.groups), 10, f"{operator} is not there for each group")
    require([g.group for g in parallel.gradient_groups] == [g.name for g in program.groups], 10, "groups do not match")
    for gradient_group, group in zip(parallel.gradient_groups, program.groups, strict=True):
        otherwise = f"{gradient_group.symbol} does not wrap the gradients of {group.name}"
        wrapper = symbol_of(gradient_group.symbol, program, 10, otherwise)
        require((wrapper.offset, wrapper.type.numel) == (group.regions["gradient"], group.numel), 10, otherwise)
    buffer = program.symbols.get(parallel.reduce_buffer)
    needed = max((group.numel * DTYPE_BYTES[group.dtype] for group in program.groups), default=0)
    holds = buffer is not None and buffer.offset is not None and buffer.type.size_bytes >= needed
    require(holds, 10, f"the reduce buffer {parallel.reduce_buffer} does not hold {needed} bytes")
