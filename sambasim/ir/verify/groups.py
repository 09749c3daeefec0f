"""Parameter groups and their places in device memory: invariants 7 to 10."""

from collections.abc import Collection, Iterable
from itertools import pairwise
from operator import itemgetter

from sambasim.errors import InvariantError
from sambasim.ir.dataflow import groups_of
from sambasim.ir.mesh import DATA_PARALLEL
from sambasim.ir.operators import OPERATORS
from sambasim.ir.program import MASTER, ParameterGroup, Program
from sambasim.ir.stages import symbols_of_ranks
from sambasim.ir.types import ALIGNMENT_BYTES, ALIGNMENT_ELEMENTS, DTYPE_BYTES, Symbol, SymbolKind
from sambasim.ir.verify.values import require, symbol_of


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
