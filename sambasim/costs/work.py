"""The work of a graph on a device: its operators as stages of a pipeline, and the tensors between them.

A device computes in bf16, whatever dtype the graph was captured in; a loss is float32, as in mixed precision training.

An operator without cost is not a stage: a view; a copy in another order, which is only an address pattern; a scaling
by a number, which the operator before it does; one without operands. Views of a value count as that value. Dropout is
made again in the backward, from its input and the seed: no mask is stored, and no dropped tensor."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import inf, prod
from typing import NamedTuple, TypeAlias

from sambasim.ir.graph import Graph, Node, SectionKind
from sambasim.ir.operators import OPERATORS, OperatorKind, flops_of
from sambasim.ir.program import Program
from sambasim.ir.ranks import of_ranks
from sambasim.ir.schedule import Action
from sambasim.ir.types import DTYPE_BYTES, VALUE_BYTES, Symbol, SymbolKind, TensorType

LANES = 32  # numbers that a compute unit processes at once (source: DFModel)


def blocks_of(node: Node, types: Mapping[str, TensorType]) -> float:
    """Of a convolution, the blocks of 32 inputs by 32 outputs of its weight, fractions included, for all taps."""
    if OPERATORS[node.operator].kind is not OperatorKind.CONVOLUTION:
        return inf
    shapes = [types[name].shape for name in node.reads if name in types]
    # the weight: operand 2 of the backward, 1 of the forward
    outputs, inputs, *taps = shapes[2 if node.operator.endswith("backward.default") else 1]
    return prod(taps) * max(1.0, outputs / LANES) * max(1.0, inputs / LANES)


def columns_of(node: Node, types: Mapping[str, TensorType]) -> int:
    """The columns of the widest result; of a convolution, its channels."""
    shapes = [types[name].shape for name in node.makes if name in types]
    channels = OPERATORS[node.operator].kind is OperatorKind.CONVOLUTION
    widths = [shape[1 if channels else -1] for shape in shapes if len(shape) > 1]
    return max(widths, default=1)


_REALS = tuple(dtype for dtype in DTYPE_BYTES if dtype.startswith(("float", "bfloat")))
_DEVICE_BYTES = {dtype: 2 if dtype in _REALS else min(size, 4) for dtype, size in VALUE_BYTES.items()}
_BATCH_NORM, _TRAINING_FLAG = "aten.batch_norm.default", 5  # with the position of `training` in its arguments

_FIXED = (SymbolKind.PARAMETER, SymbolKind.BUFFER, SymbolKind.CONSTANT)
_WHOLE_BATCH_FIRST = frozenset(f"aten.{name}" for name in (
    "_native_batch_norm_legit_functional.default", "_native_batch_norm_legit.no_stats",
    "native_batch_norm_backward.default",
))  # fmt: skip
"""Operators that need all samples before they write the first result."""

_SCALINGS = ("aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar")
_DROPOUT = "aten.native_dropout.default"
_PICKS = frozenset(f"aten.{name}" for name in (
    "embedding.default", "index.Tensor", "_unsafe_index.Tensor", "index_select.default", "gather.default",
    "take.default", "take_along_dim.default",
))  # fmt: skip
"""Operators that read only the rows of their first operand that they return."""


class Read(NamedTuple):
    """`part` of `value`. With `picks`, as many rows of it as there are results."""

    value: str
    view: str
    part: float
    picks: bool = False


@dataclass(frozen=True, slots=True)
class Stage:
    """An operator that takes time on a device. `blocks`: of the weight of a convolution, else infinity; `columns`: of
    its widest result; `needs_all`: it needs all samples before it writes a result."""

    node: int
    reads: tuple[Read, ...]
    writes: tuple[str, ...]
    product_flops: int
    blocks: float
    columns: int
    needs_all: bool

    @property
    def values(self) -> tuple[str, ...]:
        return (*(read.value for read in self.reads), *self.writes)


class Tensor(NamedTuple):
    """`rows` of `row_bytes`. A `resident` one is the same for each sample, such as a weight; others stream."""

    rows: int
    row_bytes: int
    resident: bool

    @property
    def size_bytes(self) -> int:
        return self.rows * self.row_bytes


@dataclass(frozen=True)
class Work:
    """The stages and tensors of a graph. `kept`: its outputs; `received`: what another stage of a pipeline sends."""

    stages: tuple[Stage, ...]
    tensors: Mapping[str, Tensor]
    kept: frozenset[str]
    received: frozenset[str] = frozenset()

    @cached_property
    def resident(self) -> frozenset[str]:
        """The values that are the same for each sample."""
        return frozenset(value for value, tensor in self.tensors.items() if tensor.resident)

    @cached_property
    def last_reader(self) -> Mapping[str, int]:
        return {read.value: number for number, stage in enumerate(self.stages) for read in stage.reads}


def work_of(graph: Graph, symbols: Mapping[str, Symbol]) -> Work:
    """The work of the forward and the backward in `graph`. Raises PefError for invalid operands of a product."""
    for known_graph, known_symbols, work in _RECENT:
        if known_graph is graph and known_symbols is symbols:
            return work
    types = graph.types(symbols)
    base_of: dict[str, str] = {}
    stages = list(_without_masks(graph, _stages(graph, types, base_of)))
    float32 = _loss_values(graph, stages, types)
    kept = frozenset(base_of.get(output.value, output.value) for output in graph.outputs)
    sent = _sent(graph)
    resident = _fixed(stages, symbols, sent) | _gradients(graph, stages, symbols, types, base_of, sent)
    values = dict.fromkeys(value for stage in stages for value in stage.values)
    tensors = {value: _tensor(types[value], value in float32, value in resident) for value in values}
    work = Work(tuple(stages), tensors, kept, frozenset(sent))
    _RECENT.append((graph, symbols, work))
    return work


_RECENT: deque[tuple[Graph, Mapping[str, Symbol], Work]] = deque(maxlen=8)
"""Results: a plan begins many programs with one graph."""


Row: TypeAlias = Sequence[Action] | None  # what a rank does in a pipeline; None without one


def works_of_ranks(program: Program) -> Sequence[tuple[Program, Work, Row]]:
    """By rank along pp: its program and work. Only the whole shows that a sent value is the same for each sample."""
    graph, rows = program.leading, program.schedule.rows if program.schedule is not None else (None,)
    whole = work_of(graph, program.symbols)
    own = zip(of_ranks(program), rows, strict=True)
    return [(rank, _part(whole, graph, rank.leading), row) for rank, row in own]


def _part(whole: Work, graph: Graph, own: Graph) -> Work:
    if own is graph:
        return whole
    place_of = {node.name: place for place, node in enumerate(own.nodes)}
    of_stage = ((stage, place_of.get(graph.nodes[stage.node].name)) for stage in whole.stages)
    stages = tuple(replace(stage, node=place) for stage, place in of_stage if place is not None)
    values = dict.fromkeys(value for stage in stages for value in stage.values)
    return Work(stages, {value: whole.tensors[value] for value in values}, whole.kept, whole.received)


def stage_ranges(work: Work, ends: Iterable[int]) -> list[tuple[int, int]]:
    """The range of stages of each section; `ends` are the nodes at which sections end, in order."""
    nodes = [stage.node for stage in work.stages]
    return list(pairwise([0, *(bisect_left(nodes, end) for end in ends)]))


def at_batch_size(work: Work, compiled: int, wanted: int) -> Work:
    """`work` for `wanted` samples: scales rows of streamed tensors, and FLOPs of products that read one."""

    def rows(tensor: Tensor) -> Tensor:
        fixed = tensor.resident or tensor.rows < compiled
        return tensor if fixed else Tensor(tensor.rows * wanted // compiled, tensor.row_bytes, tensor.resident)

    def scaled(stage: Stage) -> Stage:
        if all(work.tensors[read.value].resident for read in stage.reads):
            return stage
        reads = tuple(picked(read, tensors[stage.writes[0]]) if read.picks else read for read in stage.reads)
        return replace(stage, reads=reads, product_flops=stage.product_flops * wanted // compiled)

    def picked(read: Read, result: Tensor) -> Read:
        return read._replace(part=min(1.0, result.size_bytes / max(tensors[read.value].size_bytes, 1)))

    if compiled == wanted:
        return work
    tensors = {value: rows(tensor) for value, tensor in work.tensors.items()}
    return replace(work, stages=tuple(map(scaled, work.stages)), tensors=tensors)


def device_bytes_of(type_: TensorType) -> int:
    """Bytes of a tensor on a device, outside the loss."""
    return type_.numel * _DEVICE_BYTES[type_.dtype]


_NO_STAGE = (OperatorKind.OPTIMIZER, OperatorKind.COLLECTIVE, OperatorKind.GENERATOR, OperatorKind.CHECK)


def _stages(graph: Graph, types: Mapping[str, TensorType], base_of: dict[str, str]) -> Iterator[Stage]:
    """The stages in order. Adds to `base_of`: by view, its base."""
    outputs = {output.value for output in graph.outputs}
    for index, node in enumerate(graph.nodes):
        operator = OPERATORS[node.operator]
        read = [name for name in dict.fromkeys(node.reads) if name in types]
        results = list(node.makes)
        if operator.kind in _NO_STAGE or not read:
            continue
        base = base_of.get(read[0], read[0])
        # A copy of a part is no mere address pattern: its rows must be gathered.
        numels = [types[name].numel for name in results]
        copies_all = operator.kind is OperatorKind.COPY and numels == [types[base].numel]
        by_number = node.operator in _SCALINGS and len(read) == 1 and isinstance(node.args[1], (int, float))
        scales = by_number and types[read[0]].dtype == types[results[0]].dtype and results[0] not in outputs
        if copies_all or scales or operator.kind is OperatorKind.VIEW:
            base_of.update(dict.fromkeys(results, base))
            continue
        is_training = len(node.args) > _TRAINING_FLAG and node.args[_TRAINING_FLAG] is True
        needs_all = node.operator in _WHOLE_BATCH_FIRST or (node.operator == _BATCH_NORM and is_training)
        sizes = flops_of(node, types), blocks_of(node, types), columns_of(node, types)
        yield Stage(index, _reads(node, read, types, base_of), tuple(results), *sizes, needs_all)


def _without_masks(graph: Graph, stages: Iterable[Stage]) -> Iterator[Stage]:
    """`stages`, of which those of the backward read the input of a dropout instead of its results."""
    starts = (section.start for section in graph.sections if section.kind is SectionKind.BCKWD)
    backward = min(starts, default=len(graph.nodes))
    inputs: dict[str, Read] = {}
    masks: set[str] = set()
    for stage in stages:
        node = graph.nodes[stage.node]
        if node.operator == _DROPOUT:
            read, dropped = stage.reads[0], node.results[0]
            if dropped is not None:
                inputs[dropped] = inputs.get(read.value, read)
            masks.update(stage.writes if dropped is None else stage.writes[1:])
        if stage.node >= backward and any(read.value in inputs or read.value in masks for read in stage.reads):
            reads: dict[str, Read] = {}
            for read in stage.reads:
                source = inputs.get(read.value)
                if source is not None:
                    reads.setdefault(source.value, Read(source.value, source.view, source.part * read.part))
                elif read.value not in masks:
                    reads[read.value] = read
            if not reads:  # an operator on a mask alone
                masks.update(stage.writes)
                continue
            stage = replace(stage, reads=tuple(reads.values()))
        yield stage


def _reads(
    node: Node, names: list[str], types: Mapping[str, TensorType], base_of: Mapping[str, str]
) -> tuple[Read, ...]:
    """Each value once; of several views of one value, the largest."""
    reads: dict[str, Read] = {}
    results = max((types[name].numel for name in node.makes), default=0)
    for number, name in enumerate(names):
        value = base_of.get(name, name)
        whole = max(types[value].numel, 1)
        picks = number == 0 and node.operator in _PICKS
        wanted = min(results, types[name].numel) if picks else types[name].numel
        # Two lookups in one table read different rows, as two views show different parts.
        read = Read(value, node.name if picks else name, min(1.0, wanted / whole), picks)
        if value not in reads or reads[value].part < read.part:
            reads[value] = read
    return tuple(reads.values())


def _loss_values(graph: Graph, stages: list[Stage], types: Mapping[str, TensorType]) -> set[str]:
    """Floating-point values of loss operators, and of softmaxes and copies next to them."""

    def kind_of(stage: Stage) -> OperatorKind:
        return OPERATORS[graph.nodes[stage.node].operator].kind

    found = {value for stage in stages if kind_of(stage) is OperatorKind.LOSS for value in stage.values}
    for kind in (OperatorKind.SOFTMAX, OperatorKind.COPY):
        for stage in stages:
            if kind_of(stage) is kind and found.intersection(stage.values):
                found.update(stage.values)
    return {value for value in found if types[value].dtype in _REALS}


def _sent(graph: Graph) -> Mapping[str, str]:
    """By value that a stage of a pipeline receives, the one that another sends."""
    sends = (node for node in graph.nodes if node.operator == "comm.send")
    values = {dict(node.kwargs).get("tag"): name for node in sends for name in node.reads}
    received = (node for node in graph.nodes if node.operator == "comm.recv")
    pairs = ((node.results[0], values.get(dict(node.kwargs).get("tag"))) for node in received)
    return {name: value for name, value in pairs if name is not None and value is not None}


def _fixed(stages: list[Stage], symbols: Mapping[str, Symbol], sent: Mapping[str, str]) -> set[str]:
    """The model's tensors, and what is computed from them alone."""
    fixed = {name for name, symbol in symbols.items() if symbol.kind in _FIXED}
    fixed |= {name for name, value in sent.items() if value in fixed}
    for stage in stages:
        if fixed.issuperset(read.value for read in stage.reads):
            fixed.update(stage.writes)
    return fixed


def _gradients(
    graph: Graph,
    stages: list[Stage],
    symbols: Mapping[str, Symbol],
    types: Mapping[str, TensorType],
    base_of: Mapping[str, str],
    sent: Mapping[str, str],
) -> set[str]:
    """Gradients of parameters, and terms that are added to them, also those that another stage sends."""
    maker = {value: stage for stage in stages for value in stage.writes}
    known = maker.keys() | sent.keys()
    outputs = [output.value for output in graph.outputs if symbols[output.symbol].kind is SymbolKind.GRADIENT]
    found: set[str] = set()
    waiting = [base_of.get(value, value) for value in outputs]
    while waiting:
        value = waiting.pop()
        if value in found or value not in known:
            continue
        found.add(value)
        stage = maker.get(value)
        if stage is None:
            waiting.append(base_of.get(sent[value], sent[value]))
        elif OPERATORS[graph.nodes[stage.node].operator].kind is OperatorKind.POINTWISE:
            waiting += [read.value for read in stage.reads if types[read.value].numel == types[value].numel]
    return found


def _tensor(type_: TensorType, float32: bool, resident: bool) -> Tensor:
    row = type_.shape[-1] if len(type_.shape) > 1 else 1
    row_bytes = row * (DTYPE_BYTES["float32"] if float32 else _DEVICE_BYTES[type_.dtype])
    return Tensor(type_.numel // max(row, 1), row_bytes, resident or type_.numel == 1)
