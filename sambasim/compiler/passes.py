"""All passes in their order, which the function `pipeline` makes from compile options; and those passes that recompute
activations, cut sections, place symbols and check that all fits. A pass is a frozen dataclass whose fields are its
options; it may assume a program that `ir.verify` accepts, and must leave one at the stage that it `reaches`."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import sqrt
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from torch import nn

from sambasim.compiler.own_optimizer import updates_of
from sambasim.compiler.pipeline import PipelineParallel
from sambasim.compiler.sharding.plan import tp_plan_of
from sambasim.compiler.sharding.tensor_parallel import TensorParallel
from sambasim.compiler.stages import Values, crossing_of, values_of
from sambasim.compiler.update import AddDataParallel, AttachOptimizers, Update
from sambasim.costs.cut import Level, cut
from sambasim.costs.fit import check_chip, check_memory
from sambasim.costs.work import at_batch_size, work_of, works_of_ranks
from sambasim.errors import OptionError
from sambasim.hardware.budget import Budget, budget_of
from sambasim.hardware.spec import load_device
from sambasim.ir.dataflow import actions_of, is_view
from sambasim.ir.graph import MADE_AGAIN, Graph, Node, Ref, Section, SectionKind, TorchConstant, renamed, with_sections
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.ranks import of_ranks
from sambasim.ir.schedule import Schedule, make, read_csv
from sambasim.ir.types import ALIGNMENT_BYTES, DTYPE_BYTES, SymbolKind, align
from sambasim.ir.verify import Progress, verify
from sambasim.options.compile import CompileOptions
from sambasim.simulation.memory import need_of
from sambasim.units import counted

_DROPOUT = "aten.native_dropout.default"
_MADE_ONCE = (OperatorKind.COLLECTIVE, OperatorKind.GENERATOR)


@dataclass(frozen=True, slots=True)
class Recompute:
    """Repeat operators of the forward in the backward, right before it reads their results."""

    title: ClassVar[str] = "recompute activations"
    reaches: ClassVar[Progress] = Progress.CAPTURED
    mode: Literal["sections", "full"]

    def __call__(self, program: Program) -> Program:
        training = program.step
        values, passes = values_of(training, program), actions_of(training.sections)
        forward = [section for section in passes if section.kind is SectionKind.FWD]
        ends = [section.stop for section in training.sections if section.kind is SectionKind.FWD]
        if self.mode == "full":
            ends = [end for section in forward for end in _segments(training, section, values)]
        kept = _never_repeated(training, ends, passes, values)
        before, after = _held(training), _held(_Repeated(training, kept).graph())
        for section in forward:
            if after[section.stage] >= before[section.stage]:  # it gains nothing
                kept |= {name for node in training.section_nodes(section) for name in node.makes}
        return replace(program, training=_Repeated(training, kept).graph())


def _segments(graph: Graph, stage: Section, values: Values) -> list[int]:
    """The ends of segments of the forward of `stage`, of about equal bytes of activations, where one tensor crosses."""
    forward = graph.section_nodes(stage)
    places = [at for at, count in enumerate(crossing_of(forward, values), 1) if count == 1]
    made = (sum(graph.values[name].size_bytes for name in node.makes) for node in forward)
    total = list(accumulate(made, initial=0))
    count = max(round(sqrt(len(places))), 1)
    wanted = (total[-1] * part / count for part in range(1, count))
    ends = {stage.start + min(places, key=lambda at: abs(total[at] - goal)) for goal in wanted}
    return [*sorted(ends), stage.stop]


def _never_repeated(graph: Graph, ends: list[int], passes: Sequence[Section], values: Values) -> frozenset[str]:
    """Results of the forward that stay in memory; the backward may compute all others again. They are: outputs of the
    graph, what a later segment of the forward reads (`ends`: where segments end), what another stage reads, and what
    cannot be computed again, such as random numbers, collectives, and reads of buffers that change."""
    kept = {output.value for output in graph.outputs}
    made_in: dict[str, tuple[int, int]] = {}  # by value of the forward: its segment and stage
    for section in passes:
        for at, node in enumerate(graph.section_nodes(section), section.start):
            segment, is_forward = bisect_right(ends, at), section.kind is SectionKind.FWD
            for name in made_in.keys() & set(node.reads):
                if made_in[name][1] != section.stage or (is_forward and made_in[name][0] != segment):
                    kept.add(name)
            if is_forward:
                made_in |= dict.fromkeys(node.makes, (segment, section.stage))
                operator = OPERATORS[node.operator]
                is_made_once = operator.draws_random_numbers or operator.kind in _MADE_ONCE
                if is_made_once or values.buffers_read_by(node):  # in an app, buffers have changed before the backward
                    kept.update(name for name in node.results[_dropout_of(node) is not None :] if name is not None)
    return frozenset(kept)


def _held(graph: Graph) -> Counter[int]:
    """By stage, the bytes of its forward that the backward reads."""
    maker: dict[str, tuple[str, int]] = {}  # by value of the forward: what it is, or is a view of, and the stage
    read: set[tuple[str, int]] = set()
    for section, node in graph.nodes_in(graph.sections):
        bases = [maker[name] for name in node.reads if name in maker]
        if section.kind is not SectionKind.FWD:
            read.update(bases)
        elif not is_view(node):
            maker |= {name: (name, section.stage) for name in node.makes}
        elif bases:
            maker |= dict.fromkeys(node.makes, bases[0])
    held: Counter[int] = Counter()
    for name, stage in read:
        held[stage] += graph.values[name].size_bytes
    return held


class _Repeated:
    def __init__(self, graph: Graph, kept: frozenset[str]) -> None:
        forward = graph.nodes_of(SectionKind.FWD)
        self._graph, self._types = graph, dict(graph.values)
        self._maker = {name: node for node in forward for name in node.makes if name not in kept}
        self._again: dict[str, str] = {}
        self._nodes: list[Node] = []

    def graph(self) -> Graph:
        parts = []
        for section in actions_of(self._graph.sections):
            self._nodes = []
            for node in self._graph.section_nodes(section):
                placed = node if section.kind is SectionKind.FWD else self._with_repeated_operands(node)
                self._nodes.append(placed)  # behind the nodes that are repeated for it
            parts.append((section, self._nodes))
        return with_sections(replace(self._graph, values=self._types), parts)

    def _with_repeated_operands(self, node: Node) -> Node:
        again = [name for name in node.reads if name in self._maker]
        for name in again:
            if name not in self._again:
                self._repeat(self._maker[name])
        return renamed(node, {name: self._again[name] for name in again})

    def _repeat(self, maker: Node) -> None:
        results = tuple(None if name is None else name + MADE_AGAIN for name in maker.results)
        node = replace(maker, name=maker.name + MADE_AGAIN, results=results)
        if maker.operator == _DROPOUT:
            node = self._dropped(node, maker)
        for old, new in zip(maker.results, node.results, strict=False):
            if old is not None and new is not None:
                self._again[old], self._types[new] = new, self._types[old]
        self._nodes.append(self._with_repeated_operands(node))

    def _dropped(self, node: Node, maker: Node) -> Node:
        """Dropout by the mask that the forward drew, as torch's kernel computes it: the scale has the value's dtype."""
        value, one_over = maker.results[0] or "", 1.0 / (1.0 - (_dropout_of(maker) or 0.0))
        mask, scale = f"{value}__mask{MADE_AGAIN}", f"{value}__scale{MADE_AGAIN}"
        self._types[mask] = self._types[scale] = type_ = self._types[value]
        dtype = ("dtype", TorchConstant("dtype", type_.dtype))
        self._nodes += [
            Node(mask, "aten._to_copy.default", (Ref(maker.results[1] or ""),), (dtype,), (mask,), maker.module),
            Node(scale, "aten.mul.Scalar", (Ref(mask), one_over), (), (scale,), maker.module),
        ]
        return replace(node, operator="aten.mul.Tensor", args=(maker.args[0], Ref(scale)), results=node.results[:1])


def _dropout_of(node: Node) -> float | None:
    """The probability of an active dropout whose result its mask can make again; None for any other node."""
    if node.operator != _DROPOUT or node.args[2:] != (True,) or node.results[1] is None:
        return None
    probability = node.args[1]
    return float(probability) if isinstance(probability, (int, float)) and probability < 1 else None


class Pass(Protocol):
    title: ClassVar[str]
    reaches: ClassVar[Progress]

    def __call__(self, program: Program) -> Program: ...


def run_pipeline(program: Program, pipeline: Sequence[Pass], before: Callable[[str], None]) -> Program:
    """`program` after every pass of `pipeline`; `before` gets each title. Raises InvariantError after a bad pass."""
    for step in pipeline:
        before(step.title)
        program = step(program)
        verify(program, step.reaches)
    return program


@dataclass(frozen=True, slots=True)
class Partition:
    """Cut every graph into sections by the rule of `level`: see `costs.cut`. The order of execution never changes, so
    every level computes the same bits. `samples`: those of a pass, if they are not the program's."""

    title: ClassVar[str] = "partition into sections"
    reaches: ClassVar[Progress] = Progress.CAPTURED
    level: Level
    budget: Budget
    samples: int | None = None

    def __call__(self, program: Program) -> Program:
        def divided(graph: Graph) -> Graph:
            size, work = program.batch_size, work_of(graph, program.symbols)
            return cut(graph, at_batch_size(work, size, self.samples or size), self.budget, self.level)

        return program.map_graphs(divided)


@dataclass(frozen=True, slots=True)
class Place:
    """Give every symbol its byte address in device memory: each group's flat tensors first, then other symbols, the
    reduce operand buffer last. Outputs and the tangent have no address. In a pipeline, each rank has a memory of its
    own: what several ranks hold comes first, at one address, and behind it what one rank holds alone."""

    title: ClassVar[str] = "place symbols in device memory"
    reaches: ClassVar[Progress] = Progress.PLACED

    def __call__(self, program: Program) -> Program:
        parts = of_ranks(program)
        holders = {name: [rank for rank, part in enumerate(parts) if name in part.symbols] for name in program.symbols}
        ends = [0] * len(parts)

        def allocate(size_bytes: int, ranks: Sequence[int]) -> int:
            start = max(ends[rank] for rank in ranks)
            for rank in ranks:
                ends[rank] = align(start + size_bytes, ALIGNMENT_BYTES)
            return start

        kept = [s for s in program.symbols.values() if s.kind not in (SymbolKind.OUTPUT, SymbolKind.TANGENT)]
        kept.sort(key=lambda symbol: symbol.kind is SymbolKind.REDUCE_BUFFER)
        in_groups = {name for group in program.groups for name in program.symbols_of(group)}
        shared = [symbol for symbol in kept if len(holders[symbol.name]) > 1 and symbol.name not in in_groups]
        offsets = {symbol.name: allocate(symbol.type.size_bytes, range(len(parts))) for symbol in shared}
        groups = {}
        # Groups that several ranks hold come first, at one offset on all of them, so that no rank has a gap.
        for group in sorted(program.groups, key=lambda group: len(holders[group.members[0].parameter]) == 1):
            symbols_of = program.optimizers[group.optimizer].symbols_of
            regions = {
                region: allocate(group.region_type(region).size_bytes, holders[name])
                for region, name in symbols_of(group.members[0]).items()
            }
            for member in group.members:
                for region, name in symbols_of(member).items():
                    offsets[name] = regions[region] + member.start * DTYPE_BYTES[group.region_type(region).dtype]
            groups[group.name] = replace(group, regions=regions)
            if group.wrapper is not None:
                offsets[group.wrapper] = regions["gradient"]
        for symbol in kept:
            if symbol.name not in offsets:
                offsets[symbol.name] = allocate(symbol.type.size_bytes, holders[symbol.name])
        symbols = {name: replace(symbol, offset=offsets.get(name)) for name, symbol in program.symbols.items()}
        placed = tuple(groups[group.name] for group in program.groups)
        return replace(program, symbols=symbols, groups=placed, device_bytes=max(ends))


@dataclass(frozen=True, slots=True)
class Fits:
    """Raises MachineError if a rank of the program does not fit on `budget`, with the fewest replicas that may run it
    and the passes that its schedule has in flight: see `costs.fit`."""

    title: ClassVar[str] = "check that it fits"
    reaches: ClassVar[Progress] = Progress.PLACED
    budget: Budget

    def __call__(self, program: Program) -> Program:
        for part, work, row in works_of_ranks(program):
            check_chip(part.leading, work, self.budget)
            check_memory(part.leading, need_of(part, work, row=row), self.budget)
        return program


def pipeline(
    options: CompileOptions,
    updates: Sequence[Update] | None = None,
    model: nn.Module | None = None,
    tell: Callable[[str], None] = lambda notice: None,
    samples: int | None = None,
    groups: Sequence[ParameterGroup] = (),
) -> Sequence[Pass]:
    """The passes that `options` ask for. `model` may have a plan for tensor parallelism; `tell` gets notices. Sections
    are cut for a pass of `samples`, by default those of the program. `groups`: those that it is to have."""
    budget = budget_of(load_device(options.arch), options.num_tiles)
    partition = Partition(options.opt_level, budget, samples)
    passes: list[Pass] = [partition]
    if options.recompute != "none" and not options.inference:
        sections = [partition] if options.recompute == "sections" else []
        passes = [*sections, Recompute(options.recompute), partition]
    if updates is None and options.optimizer is not None:
        updates = updates_of(options.optimizer, {})
    if options.data_parallel or options.chips > 1:
        passes.append(AddDataParallel(options.world_size, options.chips, options.zero, several=options.data_parallel))
    of_tied = None
    if updates and not options.inference:
        scales, masters = options.dtype == "fp16", options.keeps_master_weights
        how = (options.stochastic_rounding, options.gradient_groups, scales, masters, options.ema)
        attach = AttachOptimizers(tuple(updates), *how, tuple(replace(group, regions={}) for group in groups))
        passes.append(attach)
        if options.zero < 2:  # from then on replicas keep gradients in slices, which need no balance
            of_tied = attach.state_bytes
    if (schedule := schedule_of(options)) is not None:
        shards = options.world_size * options.chips if options.zero else 1
        passes = [PipelineParallel(schedule, budget, of_tied, shards, samples), *passes]
    if options.tensor_parallel == "weight":
        of_model = {} if model is None else tp_plan_of(model)
        passes = [TensorParallel(options.n_chips, options.tensor_plan or {}, of_model, tell), *passes]
    return [*passes, Place(), Fits(budget)]


def schedule_of(options: CompileOptions) -> Schedule | None:
    """None without a pipeline. Raises OptionError for a schedule that cannot be."""
    ranks, micro_batches = options.pipeline_stages, options.micro_batches
    if ranks == 1:
        return None
    if not options.schedule.endswith(".csv"):
        return make(options.schedule, ranks, micro_batches)
    schedule = read_csv(Path(options.schedule))
    if (schedule.ranks, schedule.micro_batches) != (ranks, micro_batches):
        has = f"{counted(schedule.ranks, 'rank')} and {schedule.micro_batches} micro-batches"
        fitting = f"--pipeline-stages {schedule.ranks} --micro-batches {schedule.micro_batches}"
        remedy = fitting if schedule.ranks > 1 else f"write a row for each of the {ranks} ranks"
        raise OptionError(f"{options.schedule} has {has}, not {ranks} and {micro_batches}", remedy=remedy)
    return schedule
