"""Manifest -> program, trusting nothing: what pydantic has not checked is checked here.

Everything is refused with ValueError, whose text says where; `reader` makes it the error of rule 16, or of rule 24 for
a constant of torch that no table has.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import starmap
from typing import TypeVar, cast

from sambasim.ir.graph import Argument, Graph, Node, Output, Ref, Section, SourceLine, TorchConstant
from sambasim.ir.mesh import Axis
from sambasim.ir.program import (
    DataParallel,
    GradientGroup,
    Member,
    Optimizer,
    ParameterGroup,
    Program,
    RuntimeArgument,
)
from sambasim.ir.types import Symbol, TensorType
from sambasim.pef.canonical import DEEPEST_NESTING, check_json_object
from sambasim.pef.document import PefDocument
from sambasim.pef.encode import TORCH_CONSTANTS
from sambasim.pef.manifest import (
    DataParallelModel,
    GraphModel,
    GroupModel,
    Manifest,
    ProgramModel,
    RuntimeArgumentModel,
    SymbolModel,
)

_NODE_FIELDS = 7
_FLOATS = {"=inf": float("inf"), "=-inf": float("-inf"), "=nan": float("nan")}
_Item = TypeVar("_Item")


class ForbiddenConstantError(ValueError):
    """A constant of torch that is not in the tables: it has a rule of its own."""


def decode(manifest: Manifest) -> PefDocument:
    """What `manifest` says. Raises ValueError if a node, an argument or a reference between its parts is malformed."""
    for name in ("data_source", "compile_options", "training_defaults"):
        check_json_object(name, getattr(manifest, name))
    return PefDocument(
        program=_decode_program(manifest.program),
        data_source=manifest.data_source,
        compile_options=manifest.compile_options,
        training_defaults=manifest.training_defaults,
        metadata=manifest.metadata,
        digest=manifest.digest,
        weights_sha256=manifest.weights.sha256,
    )


def decode_argument(encoded: object, depth: int = 0) -> Argument:
    """The way back from `encode.encode_argument`. Raises ValueError for what that never writes."""
    if isinstance(encoded, str):
        tag, text = encoded[:1], encoded[1:]
        if tag == "%":
            return Ref(text)
        if tag == "'":
            return text
        if encoded in _FLOATS:
            return _FLOATS[encoded]
        if tag == "@":
            kind, separator, name = text.partition(":")
            if separator and kind in TORCH_CONSTANTS:
                return _constant(kind, name)
        raise ValueError(f"{encoded!r} is no argument")
    if encoded is None or isinstance(encoded, (bool, int, float)):
        return encoded
    if isinstance(encoded, list):
        if depth >= DEEPEST_NESTING:
            raise ValueError(f"an argument is nested more than {DEEPEST_NESTING} levels deep")
        return tuple([decode_argument(item, depth + 1) for item in encoded])
    raise ValueError(f"an object is no argument: {_shortened(encoded)}")


def _constant(kind: str, name: str) -> TorchConstant:
    if name not in TORCH_CONSTANTS[kind]:
        permitted = ", ".join(sorted(TORCH_CONSTANTS[kind]))
        raise ForbiddenConstantError(f"{_shortened(name)} is no {kind} that a PEF may name; it may name {permitted}")
    return TorchConstant(kind, name)


def decode_node(row: object, sources: Sequence[SourceLine]) -> Node:
    """The way back from `encode.encode_node`. Raises ValueError for a row that is not of that form."""
    if not isinstance(row, list) or len(row) != _NODE_FIELDS:
        raise ValueError(f"a node is an array of {_NODE_FIELDS}, not {_shortened(row)}")
    name, operator, arguments, keywords, results, module, source = row
    if not (isinstance(name, str) and isinstance(operator, str) and isinstance(module, str)):
        raise ValueError(f"name, operator and module of a node are text, not {_shortened([name, operator, module])}")
    if not (isinstance(arguments, list) and isinstance(keywords, list) and isinstance(results, list)):
        raise ValueError(f"arguments, keyword arguments and results of node {name} are arrays")
    if not all(result is None or isinstance(result, str) for result in results):
        raise ValueError(f"the results of node {name} are {_shortened(results)}")
    line = None
    if source is not None:
        # A bool is an int to Python, and True would be source line 1.
        if not isinstance(source, int) or isinstance(source, bool) or not 0 <= source < len(sources):
            raise ValueError(f"node {name} has no source line {_shortened(source)}")
        line = sources[source]
    return Node(
        name=name,
        operator=operator,
        args=tuple([decode_argument(argument) for argument in arguments]),
        kwargs=tuple([_decode_keyword(pair, name) for pair in keywords]),
        results=tuple(results),
        module=module,
        source=line,
    )


def _decode_keyword(pair: object, node: str) -> tuple[str, Argument]:
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
        raise ValueError(f"a keyword argument of node {node} is a name and a value, not {_shortened(pair)}")
    return pair[0], decode_argument(pair[1])


def _shortened(value: object) -> str:
    """The repr of something hostile: never long, and never of the whole of it."""
    if isinstance(value, (str, list, dict)) and len(value) > 20:
        return f"{type(value).__name__} of {len(value)}"
    text = "".join(character if character.isprintable() else "?" for character in repr(value)[:80])
    return text


def _unique(pairs: Iterable[tuple[str, _Item]], what: str) -> Mapping[str, _Item]:
    found: dict[str, _Item] = {}
    for name, item in pairs:
        if name in found:
            raise ValueError(f"{what} {name} is there twice")
        found[name] = item
    return found


def _decode_graph(graph: GraphModel) -> Graph:
    sources = list(starmap(SourceLine, graph.sources))
    types = ((name, TensorType(dtype, shape)) for name, dtype, shape in graph.values)
    return Graph(
        name=graph.name,
        inputs=graph.inputs,
        nodes=tuple([decode_node(row, sources) for row in graph.nodes]),
        outputs=tuple(starmap(Output, graph.outputs)),
        values=_unique(types, f"in graph {graph.name}, the value"),
        sections=tuple(Section(i, s.kind, s.name, s.start, s.stop) for i, s in enumerate(graph.sections)),
    )


def _decode_program(program: ProgramModel) -> Program:
    optimizers = tuple(Optimizer(o.name, o.kind, o.states) for o in program.optimizers)
    return Program(
        name=program.name,
        batch_size=program.batch_size,
        symbols=_unique(((s.name, _decode_symbol(s)) for s in program.symbols), "the symbol"),
        training=_decode_training(program.training, optimizers) if program.training else None,
        evaluation=_decode_graph(program.evaluation),
        single=_decode_graph(program.single) if program.single else None,
        loss=program.loss,
        per_sample_loss=program.per_sample_loss,
        optimizers=optimizers,
        groups=tuple(_decode_group(group, len(optimizers)) for group in program.groups),
        runtime_arguments=tuple(_decode_runtime_argument(argument) for argument in program.runtime_arguments),
        data_parallel=_decode_data_parallel(program.data_parallel) if program.data_parallel else None,
        device_bytes=program.device_bytes,
        mesh=tuple(Axis(one.name, one.size, one.at_run_time) for one in program.mesh),
    )


def _decode_training(graph: GraphModel, optimizers: Sequence[Optimizer]) -> Graph:
    decoded = _decode_graph(graph)
    updates = {f"opt.{optimizer.kind}" for optimizer in optimizers}
    for node in decoded.nodes:
        if node.operator in updates and not node.args:
            raise ValueError(f"node {node.name} updates no group")
    return decoded


def _decode_symbol(symbol: SymbolModel) -> Symbol:
    type_ = TensorType(symbol.dtype, symbol.shape)
    return Symbol(symbol.name, symbol.kind, type_, symbol.offset, symbol.torch_names, symbol.exclusive_bound)


def _decode_group(group: GroupModel, optimizers: int) -> ParameterGroup:
    if group.optimizer >= optimizers:
        raise ValueError(f"group {group.name} names optimizer {group.optimizer} of {optimizers}")
    return ParameterGroup(
        name=group.name,
        dtype=group.dtype,
        numel=group.numel,
        members=tuple(Member(m.parameter, m.gradient, m.start, m.numel) for m in group.members),
        optimizer=group.optimizer,
        regions=_unique(group.regions, f"in group {group.name}, the region"),
    )


def _decode_runtime_argument(argument: RuntimeArgumentModel) -> RuntimeArgument:
    # The schema lets through numbers, and of the tagged strings only those of floats.
    default = cast("float", decode_argument(argument.default))
    return RuntimeArgument(argument.name, default, argument.meaning)


def _decode_data_parallel(parallel: DataParallelModel) -> DataParallel:
    gradient_groups = tuple(GradientGroup(g.group, g.symbol) for g in parallel.gradient_groups)
    return DataParallel(gradient_groups, parallel.reduce_buffer)
