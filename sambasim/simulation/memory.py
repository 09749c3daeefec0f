"""The memory of one rank of a training step, by part, also for other dtypes, optimizers, levels of ZeRO and
recomputation than its program has. `need_of` adds tensors between sections, by `costs/fit.py`. Others have formulas of
their own: `planning/estimate.py`, `one_rank.py` for strategies that are not compiled, `planning/here.py` for `--here`,
`Place` of `compiler/passes.py` for the device memory of a PEF, `held_bytes` of `ir/program.py` for its symbols.

    part          ZeRO keeps a slice from   what it holds
    parameters    3                         frozen ones are whole
    gradients     2                         whole if a step has several passes: ZeRO 2 reduces in the last one
    states        1                         optimizer states and master weights
    activations   -                         what passes keep for their backward
    temporaries   -                         what lives only within a pass; for RDUs, sections have it on the chip
    buffers       -                         inputs, buffers, constants, the reduce operand, groups that are whole for
                                            some sections with ZeRO 2 and 3

Every rank has a memory of its own, as an RDU has: nothing is shared in a node.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain, product
from typing import TypeAlias

from sambasim.costs.fit import Memory, Need, reside
from sambasim.costs.work import Row, Work, stage_ranges
from sambasim.ir.dataflow import groups_of, is_view, pass_and_update, spans_of_actions
from sambasim.ir.graph import MADE_AGAIN, Graph, Node, SectionKind
from sambasim.ir.program import AVERAGE, MASTER, ParameterGroup, Program
from sambasim.ir.ranks import in_slices
from sambasim.ir.types import Symbol, SymbolKind, TensorType, cut
from sambasim.optimizers import OPTIMIZERS

RECOMPUTE = ("none", "sections", "full")

Regions: TypeAlias = frozenset[tuple[str, str]]  # names of groups, each with "parameter" or "gradient"


def need_of(program: Program, work: Work, samples: int | None = None, row: Row = None) -> Need:
    """Of the leading graph, with the fewest replicas that may run it."""
    graph, kinds = program.leading, (SymbolKind.GRADIENT, SymbolKind.BUFFER)
    excluded = frozenset(output.value for output in graph.outputs if program.symbols[output.symbol].kind in kinds)
    in_pass, _ = pass_and_update(graph)
    residency = reside(work, stage_ranges(work, [section.stop for section in in_pass]), excluded)
    between_bytes = residency.size_bytes
    if row is not None:
        spans = spans_of_actions(in_pass)
        runs = (spans[action.kind, action.stage] for action in row if (action.kind, action.stage) in spans)
        between_bytes = max([between_bytes, *residency.taken_bytes(runs)])
    return Need(replace(least_memory(program, samples), activations=between_bytes), residency)


def least_memory(program: Program, samples: int | None = None) -> Memory:
    """`memory_of` with the fewest replicas that may run it, of which each keeps the most."""
    replicas = program.world_size * program.chips
    return memory_of(program, samples=samples, replicas=replicas, passes=program.micro_batches)


def divided_by(zero: int, replicas: int, passes: int) -> dict[str, int]:
    """By region of a group, how many replicas keep a slice of it each, if a step has so many passes."""
    sliced = {"parameter": zero >= 3, "gradient": zero >= 2 and passes == 1, "states": zero >= 1}
    return {region: replicas if is_sliced else 1 for region, is_sliced in sliced.items()}


def memory_of(
    program: Program,
    *,
    samples: int | None = None,
    replicas: int = 1,
    passes: int = 1,
    whole: Iterable[Regions] | None = None,
) -> Memory:
    """Of a rank whose own program is `program`, without what passes keep; `samples` are as compiled if None; `passes`:
    of one step. Of unequal slices the largest counts. `whole`: what `whole_regions` gives."""
    by = divided_by(program.zero, replicas, passes)

    def kept(region: str) -> int:
        return sum(_region_bytes(group, region, by[region]) for group in program.groups)

    states = [(group, state) for group in program.groups for state in program.optimizers[group.optimizer].states]
    grouped = {member.parameter for group in program.groups for member in group.members}
    buffers = frozen = 0
    for symbol in program.symbols.values():
        if symbol.kind is SymbolKind.PARAMETER and symbol.name not in grouped:
            frozen += symbol.type.size_bytes
        if symbol.kind in ("input", "argument", "buffer", "constant", "reduce_buffer"):
            taken = samples if samples is not None and symbol.kind is SymbolKind.INPUT else program.batch_size
            buffers += symbol.type.size_bytes * taken // program.batch_size
    if sliced := [region for region in ("parameter", "gradient") if by[region] > 1]:
        # The most bytes by which groups that are whole for a while exceed their slices.
        more = {}
        for group, region in product(program.groups, sliced):
            more[group.name, region] = _region_bytes(group, region, 1) - _region_bytes(group, region, replicas)
        moments = whole_regions(program) if whole is None else whole
        buffers += max((sum(more.get(region, 0) for region in regions) for regions in moments), default=0)
    states_bytes = sum(_region_bytes(group, state, by["states"]) for group, state in states)
    parameters, gradients = kept("parameter") + frozen, kept("gradient")
    return Memory(parameters, gradients, states_bytes, buffers=buffers)


def _region_bytes(group: ParameterGroup, region: str, ranks: int) -> int:
    numel = max(stop - start for start, stop in cut(group.numel, ranks))
    return TensorType(group.region_type(region).dtype, (numel,)).size_bytes


def whole_regions(program: Program) -> set[Regions]:
    """The regions that are whole at the same moments of a pass: gathered parameters, gradients not reduced yet."""
    training = in_slices(program).training if program.data_parallel else None
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


def pass_memory(graph: Graph, symbols: Mapping[str, Symbol]) -> Memory:
    """Of one pass: the peak of what its backward reads, and by how much the peak of all values exceeds it, in the order
    of nodes. Views count as their bases, gradients of parameters not at all: they have their own."""
    types = graph.types(symbols)
    base: dict[str, str] = {}
    made: dict[str, int] = {}  # by base: the position of its node
    last: dict[str, int] = {}
    kept: set[str] = set()  # bases that are activations; symbols are none
    starts = (section.start for section in graph.sections if section.kind is SectionKind.BCKWD)
    backward = min(starts, default=len(graph.nodes))
    for at, node in enumerate(graph.nodes):
        operands = [base.get(name, name) for name in node.reads]
        for name in operands:
            last[name] = at
            # What the backward reads: made by the forward, or made again by a recomputed section.
            if at >= backward and (name.endswith(MADE_AGAIN) or made.get(name, backward) < backward):
                kept.add(name)
        is_operand = _is_operand(node, types)
        for name in node.makes:
            base[name] = operands[0] if is_operand else name
            if not is_operand:
                made[name] = last[name] = at
    for output in graph.outputs:  # what is returned stays
        last[base.get(output.value, output.value)] = len(graph.nodes)
    own = {base.get(output.value) for output in graph.outputs if symbols[output.symbol].kind is SymbolKind.GRADIENT}
    kept -= own
    sizes = {name: graph.values[name].size_bytes for name in made if name not in own}
    activations = _peak((made[name], last[name], size) for name, size in sizes.items() if name in kept)
    everything = _peak((made[name], last[name], size) for name, size in sizes.items())
    return Memory(activations=activations, temporaries=everything - activations)


def _is_operand(node: Node, types: Mapping[str, TensorType]) -> bool:
    """Whether the result is the operand, or a view of it: a functional graph needs no clones."""
    if node.operator in ("aten.clone.default", "aten._to_copy.default"):
        (result,), operand = node.results, node.reads[0]
        return result is not None and types[result] == types[operand] and "memory_format" not in dict(node.kwargs)
    return is_view(node)


def _peak(lives: Iterable[tuple[int, int, int]]) -> int:
    change: defaultdict[int, int] = defaultdict(int)
    for first, last, size in lives:
        change[first] += size
        change[last + 1] -= size
    return max(accumulate(change[at] for at in sorted(change)), default=0)


@dataclass(frozen=True, slots=True)
class Dtype:
    """How parameters, gradients and activations are stored, as `--dtype` and `--master-weights` say it."""

    name: str
    stored: str
    master: bool = False

    @property
    def title(self) -> str:
        return f"{self.name} + master" if self.master else self.name


DTYPES = (
    Dtype("fp32", "float32"), Dtype("bf16", "bfloat16"), Dtype("bf16", "bfloat16", master=True),
    Dtype("fp16", "float16", master=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """`states` are those that the optimizer keeps of each parameter, without master weights and averages."""

    dtype: Dtype
    recompute: str
    optimizer: str
    states: tuple[str, ...]
    zero: int


def by_dtype(asked: Choice) -> list[Choice]:
    return [replace(asked, dtype=dtype, recompute=mode) for dtype, mode in product(DTYPES, RECOMPUTE)]


def by_optimizer(asked: Choice) -> list[Choice]:
    """For each optimizer with default options; if its default keeps no state, also with what it has at most."""
    kept = {kind: (entry.kept_states({}), tuple(entry.states)) for kind, entry in OPTIMIZERS.items()}
    pairs = ((kind, states) for kind, (least, most) in kept.items() for states in ([least] if least else [(), most]))
    return [replace(asked, optimizer=kind, states=states) for kind, states in pairs]


def by_zero(asked: Choice) -> list[Choice]:
    return [replace(asked, zero=zero) for zero in range(4)]


class Choices:
    """Memory of a `program` stored in `dtype`; `replicas` take `passes` in a step; `graphs`: by recomputation."""

    def __init__(
        self, program: Program, graphs: Mapping[str, Graph], dtype: str, *, replicas: int, passes: int
    ) -> None:
        self.program, self.graphs, self.dtype, self.replicas, self.passes = program, graphs, dtype, replicas, passes
        self._held, self._kept = cache(self._held_by), cache(self._kept_by)
        self._whole = cache(lambda zero: whole_regions(replace(program, zero=zero)))

    def estimate(self, choice: Choice) -> Memory:
        held = self._held(choice.dtype.stored, choice.recompute)
        kept = self._kept(replace(choice, recompute="none"))
        return replace(kept, activations=held.activations, temporaries=held.temporaries)

    def _held_by(self, stored: str, recompute: str) -> Memory:
        graph = self.graphs[recompute]
        values = {name: in_dtype(type_, self.dtype, stored) for name, type_ in graph.values.items()}
        return pass_memory(replace(graph, values=values), self._symbols_in(stored))

    def _kept_by(self, choice: Choice) -> Memory:
        program, dtype, zero = self.program, choice.dtype, choice.zero
        stored, in_states = {self.dtype: dtype.stored}, "float32" if dtype.master else None
        dtypes = ((group, stored.get(group.dtype, group.dtype)) for group in program.groups)
        groups = tuple(replace(group, dtype=in_group, state_dtype=in_states) for group, in_group in dtypes)
        states = *([MASTER] if dtype.master else []), *choice.states, *([AVERAGE] if program.averages else [])
        optimizers = tuple(replace(optimizer, kind=choice.optimizer, states=states) for optimizer in program.optimizers)
        symbols, whole = self._symbols_in(dtype.stored), self._whole(zero)
        changed = replace(program, symbols=symbols, groups=groups, optimizers=optimizers, zero=zero)
        return memory_of(changed, replicas=self.replicas, passes=self.passes, whole=whole)

    def _symbols_in(self, stored: str) -> Mapping[str, Symbol]:
        symbols = self.program.symbols.items()
        return {name: replace(symbol, type=in_dtype(symbol.type, self.dtype, stored)) for name, symbol in symbols}

    def least(self, asked: Choice) -> Choice:
        """The one with the least memory that the optimizer asked for can have."""
        every = chain.from_iterable(map(by_dtype, by_zero(asked)))
        return min(every, key=lambda choice: self.estimate(choice).total_bytes)


def in_dtype(type_: TensorType, captured: str, wanted: str) -> TensorType:
    """`type_`, with numbers stored in `wanted` if they are in `captured`."""
    return TensorType(wanted, type_.shape) if type_.dtype == captured else type_
