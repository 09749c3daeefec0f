"""Program -> manifest. `decode` is the way back, and decode(encode(x)) == x for every document.

An argument of a node is spelled so that its type survives JSON:

    None, True, 3, 0.5      null, true, 3, 0.5
    inf, -inf, nan          "=inf", "=-inf", "=nan"
    "mean"                  "'mean"           text: everything after the first character
    Ref("x")                "%x"
    TorchConstant           "@dtype:float32"  kind and name
    (1, (2, 3))             [1, [2, 3]]
"""

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from sambasim import __version__
from sambasim.errors import InternalError
from sambasim.ir.graph import Argument, Graph, Node, Ref, SourceLine, TorchConstant
from sambasim.ir.program import DataParallel, Optimizer, ParameterGroup, Program, RuntimeArgument
from sambasim.ir.types import DTYPE_BYTES, Symbol
from sambasim.pef.document import PefDocument
from sambasim.pef.manifest import (
    FORMAT_NAME,
    FORMAT_VERSION,
    AxisModel,
    DataParallelModel,
    GradientGroupModel,
    GraphModel,
    GroupModel,
    Manifest,
    MemberModel,
    OptimizerModel,
    ProgramModel,
    RuntimeArgumentModel,
    SectionModel,
    SymbolModel,
    WeightsModel,
)

EncodedArgument: TypeAlias = "bool | int | float | str | list[EncodedArgument] | None"
TORCH_CONSTANTS: Mapping[str, frozenset[str]] = {
    "dtype": frozenset(DTYPE_BYTES),
    "layout": frozenset({"strided"}),
    "memory_format": frozenset({"contiguous_format", "preserve_format", "channels_last", "channels_last_3d"}),
    "device": frozenset({"cpu"}),
}
"""By kind: the names that a constant of torch may have in a PEF. Closed, since a reader looks them up in torch."""

NO_DIGEST = "0" * 64
"""Stands where a digest will be, so that the manifest has its final size before the weights have been read."""


def encode(document: PefDocument, weights_size_bytes: int) -> Manifest:
    """The manifest of `document`; digests that it does not have yet are zeros.

    Raises pydantic.ValidationError if the document holds something that a manifest cannot say.
    """
    return Manifest(
        format=FORMAT_NAME,
        version=".".join(map(str, FORMAT_VERSION)),
        writer=f"sambasim {__version__}",
        digest=document.digest or NO_DIGEST,
        program=_encode_program(document.program),
        weights=WeightsModel(sha256=document.weights_sha256 or NO_DIGEST, size_bytes=weights_size_bytes),
        data_source=dict(document.data_source),
        compile_options=dict(document.compile_options),
        training_defaults=dict(document.training_defaults),
        metadata=dict(document.metadata),
    )


def encode_argument(argument: Argument) -> EncodedArgument:
    """An argument as JSON. Raises InternalError for what is no argument."""
    if isinstance(argument, Ref):
        return f"%{argument.name}"
    if argument is None or isinstance(argument, (bool, int)):
        return argument
    if isinstance(argument, float):
        return argument if math.isfinite(argument) else f"={argument}"
    if isinstance(argument, str):
        return f"'{argument}"
    if isinstance(argument, TorchConstant) and argument.name in TORCH_CONSTANTS.get(argument.kind, ()):
        return f"@{argument.kind}:{argument.name}"
    if isinstance(argument, tuple):
        return [encode_argument(item) for item in argument]
    raise InternalError(f"{argument!r} is no argument that a PEF can say")


def encode_node(node: Node, sources: dict[SourceLine, int]) -> list[object]:
    """A node as a row: name, operator, arguments, keyword arguments, results, module, index of its source line or null.

    A source line that is not yet in `sources` is added to it.
    """
    source = None if node.source is None else sources.setdefault(node.source, len(sources))
    arguments = [encode_argument(argument) for argument in node.args]
    keywords = [[key, encode_argument(argument)] for key, argument in node.kwargs]
    return [node.name, node.operator, arguments, keywords, list(node.results), node.module, source]


def _encode_graph(graph: Graph) -> GraphModel:
    sources: dict[SourceLine, int] = {}
    nodes = tuple(encode_node(node, sources) for node in graph.nodes)
    for index, section in enumerate(graph.sections):
        if section.index != index:
            raise InternalError(f"section {index} of {graph.name} is numbered {section.index}")
    return GraphModel(
        name=graph.name,
        inputs=graph.inputs,
        nodes=nodes,
        outputs=tuple((output.value, output.symbol) for output in graph.outputs),
        values=tuple((name, type_.dtype, type_.shape) for name, type_ in graph.values.items()),
        sections=tuple(SectionModel(kind=s.kind, name=s.name, start=s.start, stop=s.stop) for s in graph.sections),
        sources=tuple((source.file, source.line, source.code) for source in sources),
    )


def _encode_program(program: Program) -> ProgramModel:
    for name, symbol in program.symbols.items():
        if name != symbol.name:
            raise InternalError(f"symbol {symbol.name} is filed under {name}")
    return ProgramModel(
        name=program.name,
        batch_size=program.batch_size,
        symbols=tuple(_encode_symbol(symbol) for symbol in program.symbols.values()),
        training=_encode_graph(program.training) if program.training else None,
        evaluation=_encode_graph(program.evaluation),
        single=_encode_graph(program.single) if program.single else None,
        loss=program.loss,
        per_sample_loss=program.per_sample_loss,
        optimizers=_encode_optimizers(program.optimizers),
        groups=tuple(_encode_group(group) for group in program.groups),
        runtime_arguments=tuple(_encode_runtime_argument(argument) for argument in program.runtime_arguments),
        data_parallel=_encode_data_parallel(program.data_parallel) if program.data_parallel else None,
        device_bytes=program.device_bytes,
        mesh=tuple(AxisModel(name=one.name, size=one.size, at_run_time=one.at_run_time) for one in program.mesh),
    )


def _encode_symbol(symbol: Symbol) -> SymbolModel:
    return SymbolModel(
        name=symbol.name,
        kind=symbol.kind,
        dtype=symbol.type.dtype,
        shape=symbol.type.shape,
        offset=symbol.offset,
        torch_names=symbol.torch_names,
        exclusive_bound=symbol.exclusive_bound,
    )


def _encode_optimizers(optimizers: Sequence[Optimizer]) -> tuple[OptimizerModel, ...]:
    # The model knows the kinds by name; an unknown one is refused there, not here.
    rows = ({"name": o.name, "kind": o.kind, "states": o.states} for o in optimizers)
    return tuple(OptimizerModel.model_validate(row) for row in rows)


def _encode_group(group: ParameterGroup) -> GroupModel:
    return GroupModel(
        name=group.name,
        dtype=group.dtype,
        numel=group.numel,
        members=tuple(
            MemberModel(parameter=m.parameter, gradient=m.gradient, start=m.start, numel=m.numel) for m in group.members
        ),
        optimizer=group.optimizer,
        regions=tuple(group.regions.items()),
    )


def _encode_runtime_argument(argument: RuntimeArgument) -> RuntimeArgumentModel:
    row = {"name": argument.name, "default": encode_argument(argument.default), "meaning": argument.meaning}
    return RuntimeArgumentModel.model_validate(row)


def _encode_data_parallel(parallel: DataParallel) -> DataParallelModel:
    return DataParallelModel(
        gradient_groups=tuple(GradientGroupModel(group=g.group, symbol=g.symbol) for g in parallel.gradient_groups),
        reduce_buffer=parallel.reduce_buffer,
    )
