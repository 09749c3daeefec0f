"""The memory of one rank of a training step, by part.

    part          ZeRO keeps a slice from   what it holds
    parameters    3                         frozen ones are whole
    gradients     2                         whole if a step has several passes: ZeRO 2 reduces in the last one
    states        1                         optimizer states and master weights
    activations   -                         what passes keep for their backward
    buffers       -                         inputs, buffers, constants, the reduce operand, groups that are whole for
                                            some sections with ZeRO 2 and 3

Every rank has a memory of its own, as an RDU has: nothing is shared in a node.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeAlias

from sambasim.costs.fit import Need, reside
from sambasim.costs.work import Work
from sambasim.ir.dataflow import groups_of, pass_and_update, spans_of_actions
from sambasim.ir.graph import MADE_AGAIN, Graph, Node, SectionKind
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.ranks import in_slices
from sambasim.ir.schedule import Action
from sambasim.ir.types import Symbol, SymbolKind, TensorType, cut

_LEVEL = {"parameter": 3, "gradient": 2}
"""By region of a group: the level of ZeRO from which a rank keeps its slice only. States: 1."""

Regions: TypeAlias = frozenset[tuple[str, str]]
"""Names of groups, each with "parameter" or "gradient"."""

_BUFFERS = (SymbolKind.INPUT, SymbolKind.BUFFER, SymbolKind.CONSTANT, SymbolKind.REDUCE_BUFFER)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank, by part."""

    parameters: int
    gradients: int
    states: int
    activations: int
    buffers: int

    @property
    def total_bytes(self) -> int:
        return self.parameters + self.gradients + self.states + self.activations + self.buffers


_KEPT_OUTPUTS = (SymbolKind.GRADIENT, SymbolKind.BUFFER)


def need_of(
    program: Program,
    work: Work,
    sections: Sequence[tuple[int, int]],
    samples: int | None = None,
    row: Sequence[Action] | None = None,
) -> Need:
    """The off-chip memory of one rank, whose own program is `program`: of its training step, or else of its evaluation,
    with the fewest replicas that may run it. `sections` are ranges of stages of `work`, `samples` is the batch size, if
    it is not the compiled one, and `row` what the rank does in a pipeline."""
    graph = program.leading
    excluded = frozenset(
        output.value for output in graph.outputs if program.symbols[output.symbol].kind in _KEPT_OUTPUTS
    )
    kept = memory_of(
        program,
        activations_bytes=0,
        samples=samples,
        replicas=program.world_size * program.chips,
        passes=program.micro_batches,
    )
    residency = reside(work, sections, excluded)
    between_bytes = residency.size_bytes
    if row is not None:
        in_pass, _ = pass_and_update(graph)
        spans = spans_of_actions(in_pass)
        runs = (spans[action.kind, action.stage] for action in row if (action.kind, action.stage) in spans)
        between_bytes = max(between_bytes, residency.most_bytes(runs))
    return Need(kept.total_bytes, residency, between_bytes)


def rows_of(program: Program) -> Sequence[Sequence[Action] | None]:
    """By rank on the axis pp: its row of the schedule, None without a pipeline."""
    return (None,) if program.schedule is None else program.schedule.rows


def memory_of(
    program: Program,
    *,
    activations_bytes: int,
    samples: int | None = None,
    zero: int | None = None,
    replicas: int = 1,
    in_flight: int = 1,
    passes: int = 1,
    whole: Iterable[Regions] | None = None,
) -> Memory:
    """The memory of a rank whose own program (`ir.ranks.of_ranks`) is `program`. `activations_bytes`: what one pass of
    `samples` keeps for its backward, and `in_flight` passes keep at once. `passes`: those of one step. `samples` and
    `zero` are as compiled if None. Of unequal slices the largest counts. A program without data parallelism has
    whole groups, whatever `zero` is. `whole`: what `whole_regions` gives, for who asks about several dtypes."""
    level = program.zero if zero is None or not program.data_parallel else zero
    in_slices_only = {region for region, first in _LEVEL.items() if level >= first}
    if passes > 1:
        in_slices_only.discard("gradient")

    def kept(region: str) -> int:
        ranks = replicas if region in in_slices_only else 1
        return sum(_region_bytes(group, region, ranks) for group in program.groups)

    states = sum(
        _region_bytes(group, state, replicas if level >= 1 else 1)
        for group in program.groups
        for state in program.optimizers[group.optimizer].states
    )
    grouped = {member.parameter for group in program.groups for member in group.members}
    symbols = program.symbols.values()
    frozen = sum(
        symbol.type.size_bytes
        for symbol in symbols
        if symbol.kind is SymbolKind.PARAMETER and symbol.name not in grouped
    )
    buffers = sum(
        _at(symbol.type, symbol.kind, program.batch_size, samples) for symbol in symbols if symbol.kind in _BUFFERS
    )
    if in_slices_only:
        regions = whole_regions(program, level) if whole is None else whole
        buffers += _whole_for_a_while(program, in_slices_only, replicas, regions)
    return Memory(
        parameters=kept("parameter") + frozen,
        gradients=kept("gradient"),
        states=states,
        activations=activations_bytes * in_flight,
        buffers=buffers,
    )


def operand_bytes(program: Program) -> int:
    """Of the reduce operand."""
    symbols = program.symbols.values()
    return sum(symbol.type.size_bytes for symbol in symbols if symbol.kind is SymbolKind.REDUCE_BUFFER)


def _region_bytes(group: ParameterGroup, region: str, ranks: int) -> int:
    """The largest of `ranks` slices of a region of `group`."""
    numel = max(stop - start for start, stop in cut(group.numel, ranks))
    return TensorType(group.region_type(region).dtype, (numel,)).size_bytes


def _at(type_: TensorType, kind: SymbolKind, compiled: int, samples: int | None) -> int:
    scales = kind is SymbolKind.INPUT and samples is not None
    return type_.size_bytes * (samples or compiled) // compiled if scales else type_.size_bytes


def whole_regions(program: Program, zero: int) -> set[Regions]:
    """The regions of groups that are whole at the same moments of a pass with this level of ZeRO: parameters that are
    gathered, and gradients that are not reduced yet."""
    training = in_slices(replace(program, zero=zero)).training if program.data_parallel else None
    if training is None:
        return set()
    of_gradient = {member.gradient: group.name for group in program.groups for member in group.members}
    of_value = {output.value: of_gradient[output.symbol] for output in training.outputs if output.symbol in of_gradient}
    found: set[Regions] = set()
    whole: Regions = frozenset()
    for node in training.nodes:
        if node.operator == "memory.release":
            whole -= {(str(node.args[0]), str(node.args[1]))}
            continue
        begins = {(of_value[name], "gradient") for name in node.results if name in of_value}
        if node.operator == "comm.all_gather":
            begins = {(name, "parameter") for name in groups_of(node)}
        if not begins <= whole:
            whole |= begins
            found.add(whole)
    return found


def _whole_for_a_while(program: Program, kinds: set[str], replicas: int, whole: Iterable[Regions]) -> int:
    """The most bytes by which groups of which a rank keeps slices of regions of these `kinds` exceed their slices."""
    more = {
        (group.name, region): group.region_type(region).size_bytes - _region_bytes(group, region, replicas)
        for group in program.groups
        for region in kinds
    }
    return max((sum(more.get(region, 0) for region in regions) for regions in whole), default=0)


@dataclass(frozen=True, slots=True)
class PassMemory:
    """Bytes of the values of one pass: those of the forward that the backward reads, or made again for it, at their
    peak; and by how much the peak of all values between operators exceeds that."""

    activations: int
    temporaries: int


def pass_memory(graph: Graph, symbols: Mapping[str, Symbol]) -> PassMemory:
    """The memory of the values of `graph`, in the order of its nodes. Views count as what they are views of, gradients
    of parameters not at all: they have memory of their own, from the start of a step to its end."""
    types = {name: symbol.type for name, symbol in symbols.items()} | dict(graph.values)
    base: dict[str, str] = {}
    made: dict[str, int] = {}  # by base: the position of its node
    last: dict[str, int] = {}
    kept: set[str] = set()  # bases that are activations; symbols are none
    backward = min(
        (section.start for section in graph.sections if section.kind is SectionKind.BCKWD), default=len(graph.nodes)
    )
    for at, node in enumerate(graph.nodes):
        operands = [base.get(name, name) for name in node.reads]
        for name in operands:
            last[name] = at
            # What the backward reads: made by the forward, or made again by a recomputed section.
            if at >= backward and (name.endswith(MADE_AGAIN) or made.get(name, backward) < backward):
                kept.add(name)
        is_view = _is_operand(node, types)
        for name in filter(None, node.results):
            base[name] = operands[0] if is_view else name
            if not is_view:
                made[name] = last[name] = at
    for output in graph.outputs:  # what is returned stays
        last[base.get(output.value, output.value)] = len(graph.nodes)
    own = {base.get(output.value) for output in graph.outputs if symbols[output.symbol].kind is SymbolKind.GRADIENT}
    kept -= own
    sizes = {name: graph.values[name].size_bytes for name in made if name not in own}
    activations = _peak((made[name], last[name], size) for name, size in sizes.items() if name in kept)
    everything = _peak((made[name], last[name], size) for name, size in sizes.items())
    return PassMemory(activations, everything - activations)


def _is_operand(node: Node, types: Mapping[str, TensorType]) -> bool:
    """Whether the result is the operand, or a view of it. A functional graph needs no clones, as which dropout at 0 is
    recorded too, and no conversions to the type that a value has."""
    if node.operator in ("aten.clone.default", "aten._to_copy.default"):
        (result,), operand = node.results, node.reads[0]
        return result is not None and types[result] == types[operand] and "memory_format" not in dict(node.kwargs)
    return OPERATORS[node.operator].kind is OperatorKind.VIEW


def _peak(lives: Iterable[tuple[int, int, int]]) -> int:
    """The most bytes at any position: of each value the first and the last position, and its size."""
    change: defaultdict[int, int] = defaultdict(int)
    for first, last, size in lives:
        change[first] += size
        change[last + 1] -= size
    return max(accumulate(change[at] for at in sorted(change)), default=0)
