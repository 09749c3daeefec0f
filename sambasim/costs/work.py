"""What a graph asks of a device: its operators as stages of a pipeline, and the tensors between them.

A device works in bf16, whatever type a graph was captured in: two bytes a number. The operators of a loss, and what
they read and write, are float32, as mixed precision has it everywhere. Whole numbers have four bytes, truth values one.

What costs nothing is no stage: a view, a copy in another order, which is a pattern of addresses on the device, and what
depends on nothing, such as a constant mask. Values are told apart by what they are made of: a view is what it shows.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from sambasim.costs.units import PRODUCTS, units_of
from sambasim.ir.graph import Graph, Node, node_references
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.types import DTYPE_BYTES, Symbol, SymbolKind, TensorType

_DEVICE_BYTES = {
    dtype: 2 if dtype.startswith(("float", "bfloat")) else min(size, 4) for dtype, size in DTYPE_BYTES.items()
}
_REALS = tuple(dtype for dtype in DTYPE_BYTES if dtype.startswith(("float", "bfloat")))
_WIDE_BYTES = 4
_TRAINING_FLAG = 5
"""Its place among the arguments of batch_norm."""

_FIXED = (SymbolKind.PARAMETER, SymbolKind.BUFFER, SymbolKind.CONSTANT)
_WHOLE_BATCH_FIRST = frozenset({
    "aten._native_batch_norm_legit_functional.default",
    "aten._native_batch_norm_legit.no_stats",
    "aten.native_batch_norm_backward.default",
})  # fmt: skip
"""Operators that must have seen all samples before they give the first result."""

_PICKS = frozenset(f"aten.{name}" for name in (
    "embedding.default", "index.Tensor", "_unsafe_index.Tensor", "index_select.default", "gather.default",
    "take.default", "take_along_dim.default",
))  # fmt: skip
"""Operators that read of their first operand what they give."""


class Read(NamedTuple):
    """What an operator reads: a value, which view of it, and what part of it that is."""

    value: str
    view: str
    part: float


@dataclass(frozen=True, slots=True)
class Stage:
    """An operator that a device works for.

    node: its place among the nodes of the graph
    reads, writes: values, each once
    product_flops: floating-point operations of matrix products and convolutions; 0 for other operators
    units: compute units that can share the products: see `sambasim.costs.units`
    needs_all: it reads all of what it is given before it writes
    """

    node: int
    reads: tuple[Read, ...]
    writes: tuple[str, ...]
    product_flops: int
    units: float
    needs_all: bool


@dataclass(frozen=True, slots=True)
class Tensor:
    """A value as the device holds it: `rows` of `row_bytes`; one of a single dimension has rows of one number. What is
    `resident` is the same for each sample, such as a weight; other values stream through, some rows at a time."""

    rows: int
    row_bytes: int
    resident: bool

    @property
    def size_bytes(self) -> int:
        """All rows."""
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Work:
    """The stages of a graph, in order, and the tensors by value. `kept` are the values that outlive the graph."""

    stages: tuple[Stage, ...]
    tensors: Mapping[str, Tensor]
    kept: frozenset[str]

    @cached_property
    def last_reader(self) -> Mapping[str, int]:
        """By value: the number of the last stage that reads it."""
        return {read.value: number for number, stage in enumerate(self.stages) for read in stage.reads}


def work_of(graph: Graph, symbols: Mapping[str, Symbol]) -> Work:
    """The work of the forward and the backward in `graph`. Raises PefError for an operator that is given what it does
    not take."""
    types = {**graph.values, **{name: symbol.type for name, symbol in symbols.items()}}
    made_of: dict[str, str] = {}
    stages = list(_stages(graph, types, made_of))
    widened = _of_the_loss(graph, stages, types)
    kept = frozenset(made_of.get(output.value, output.value) for output in graph.outputs)
    resident = _fixed(stages, symbols) | _gradients(graph, stages, symbols, types, made_of)
    stages = [
        replace(stage, units=units_of(graph.nodes[stage.node], types, lambda name: made_of.get(name, name) in resident))
        if stage.product_flops
        else stage
        for stage in stages
    ]
    values = dict.fromkeys(value for stage in stages for value in _values(stage))
    tensors = {value: _tensor(types[value], value in widened, value in resident) for value in values}
    return Work(tuple(stages), tensors, kept)


def stage_ranges(work: Work, ends: Iterable[int]) -> list[tuple[int, int]]:
    """The stages of each section; `ends` are the nodes at which sections end, in order."""
    ranges, start = [], 0
    for end in ends:
        stop = start
        while stop < len(work.stages) and work.stages[stop].node < end:
            stop += 1
        ranges.append((start, stop))
        start = stop
    return ranges


def at_batch_size(work: Work, compiled: int, wanted: int) -> Work:
    """`work` of batches of `compiled` samples, for batches of `wanted`: what streams has so many rows more or less, and
    each product that reads it so many operations. Its smallest tensors, of fewer rows than samples, stay as they are.
    """

    def rows(tensor: Tensor) -> Tensor:
        if tensor.resident or tensor.rows < compiled:
            return tensor
        return replace(tensor, rows=tensor.rows * wanted // compiled)

    def flops(stage: Stage) -> Stage:
        if all(work.tensors[read.value].resident for read in stage.reads):
            return stage
        return replace(stage, product_flops=stage.product_flops * wanted // compiled)

    if compiled == wanted:
        return work
    tensors = {value: rows(tensor) for value, tensor in work.tensors.items()}
    return Work(tuple(map(flops, work.stages)), tensors, work.kept)


def device_bytes_of(type_: TensorType) -> int:
    """What a tensor takes on a device, that is of no loss."""
    return type_.numel * _DEVICE_BYTES[type_.dtype]


def _values(stage: Stage) -> tuple[str, ...]:
    return (*(read.value for read in stage.reads), *stage.writes)


def _stages(graph: Graph, types: Mapping[str, TensorType], made_of: dict[str, str]) -> Iterator[Stage]:
    """In order. `made_of` is filled: by value, the one that it shows."""
    for place, node in enumerate(graph.nodes):
        operator = OPERATORS[node.operator]
        if operator.kind in (OperatorKind.OPTIMIZER, OperatorKind.COLLECTIVE):
            continue
        read = [name for name in dict.fromkeys(node_references(node)) if name in types]
        results = [name for name in node.results if name is not None]
        if not read:
            continue
        source = made_of.get(read[0], read[0])
        if _is_free(operator.kind, results, source, types):
            made_of.update(dict.fromkeys(results, source))
            continue
        is_product = operator.kind in PRODUCTS
        yield Stage(
            node=place,
            reads=_reads(node, read, types, made_of),
            writes=tuple(results),
            product_flops=operator.flops(node, types.__getitem__) if is_product else 0,
            units=0.0,
            needs_all=_needs_all(node),
        )


def _reads(
    node: Node, names: list[str], types: Mapping[str, TensorType], made_of: Mapping[str, str]
) -> tuple[Read, ...]:
    """Each value once; of several views of one value, the largest."""
    reads: dict[str, Read] = {}
    given = max((types[name].numel for name in node.results if name is not None), default=0)
    for number, name in enumerate(names):
        value = made_of.get(name, name)
        whole = max(types[value].numel, 1)
        picks = number == 0 and node.operator in _PICKS
        wanted = min(given, types[name].numel) if picks else types[name].numel
        # Two lookups in one table find different rows, as two views show different parts.
        read = Read(value, node.name if picks else name, min(1.0, wanted / whole))
        if value not in reads or reads[value].part < read.part:
            reads[value] = read
    return tuple(reads.values())


def _needs_all(node: Node) -> bool:
    if node.operator == "aten.batch_norm.default":
        return len(node.args) > _TRAINING_FLAG and node.args[_TRAINING_FLAG] is True
    return node.operator in _WHOLE_BATCH_FIRST


def _is_free(kind: OperatorKind, results: list[str], source: str, types: Mapping[str, TensorType]) -> bool:
    """Whether it is a pattern of addresses. A copy of a part of something is not: rows must move together."""
    if kind is OperatorKind.VIEW:
        return True
    return kind is OperatorKind.COPY and len(results) == 1 and types[results[0]].numel == types[source].numel


def _of_the_loss(graph: Graph, stages: list[Stage], types: Mapping[str, TensorType]) -> set[str]:
    """What the operators of the loss read and write, and the softmaxes and copies that belong to them."""

    def kind_of(stage: Stage) -> OperatorKind:
        return OPERATORS[graph.nodes[stage.node].operator].kind

    found = {value for stage in stages if kind_of(stage) is OperatorKind.LOSS for value in _values(stage)}
    for kind in (OperatorKind.SOFTMAX, OperatorKind.COPY):
        for stage in stages:
            if kind_of(stage) is kind and found.intersection(_values(stage)):
                found.update(_values(stage))
    return {value for value in found if types[value].dtype in _REALS}


def _fixed(stages: list[Stage], symbols: Mapping[str, Symbol]) -> set[str]:
    """What is the same for each sample: the model's tensors, and what is made of them alone."""
    fixed = {name for name, symbol in symbols.items() if symbol.kind in _FIXED}
    for stage in stages:
        if fixed.issuperset(read.value for read in stage.reads):
            fixed.update(stage.writes)
    return fixed


def _gradients(
    graph: Graph,
    stages: list[Stage],
    symbols: Mapping[str, Symbol],
    types: Mapping[str, TensorType],
    made_of: Mapping[str, str],
) -> set[str]:
    """The gradients of parameters, and what is only added to one."""
    maker = {value: stage for stage in stages for value in stage.writes}
    outputs = [output.value for output in graph.outputs if symbols[output.symbol].kind is SymbolKind.GRADIENT]
    found: set[str] = set()
    waiting = [made_of.get(value, value) for value in outputs]
    while waiting:
        value = waiting.pop()
        if value in found or value not in maker:
            continue
        found.add(value)
        stage = maker[value]
        if OPERATORS[graph.nodes[stage.node].operator].kind is OperatorKind.POINTWISE:
            waiting += [read.value for read in stage.reads if types[read.value].numel == types[value].numel]
    return found


def _tensor(type_: TensorType, widened: bool, resident: bool) -> Tensor:
    row = type_.shape[-1] if len(type_.shape) > 1 else 1
    return Tensor(
        rows=type_.numel // max(row, 1),
        row_bytes=row * (_WIDE_BYTES if widened else _DEVICE_BYTES[type_.dtype]),
        resident=resident or type_.numel == 1,
    )
