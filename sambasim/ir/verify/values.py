"""Values, types, sections and outputs: invariants 1 to 4, 6, 12, 14, 15 and 17; and `require`, which states one."""

from collections.abc import Mapping

from sambasim.errors import InvariantError
from sambasim.ir.graph import TORCH_CONSTANTS, Argument, Graph, TorchConstant
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import Program
from sambasim.ir.types import DTYPE_BYTES, VALUE_BYTES, Symbol, SymbolKind, TensorType

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
