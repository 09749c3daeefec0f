"""Passes over a program, and the pipeline that runs them. A pass is a frozen dataclass whose fields are its options; it
may assume a program that `ir.verify` accepts, and must leave one at the stage that it `reaches`.
`pipeline` makes them from compile options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Protocol

from torch import nn

from sambasim.compiler.passes.recompute import Recompute
from sambasim.compiler.passes.update import AddDataParallel, AttachOptimizers, Update
from sambasim.compiler.pipeline.messages import PipelineParallel
from sambasim.compiler.sharding.plan import tp_plan_of
from sambasim.compiler.sharding.tensor_parallel import TensorParallel
from sambasim.costs.cut import Level, cut
from sambasim.costs.fit import check_chip, check_memory
from sambasim.costs.work import at_batch_size, stage_ranges, work_of, works_of_ranks
from sambasim.errors import OptionError
from sambasim.hardware.budget import Budget, budget_of
from sambasim.hardware.spec import load_device
from sambasim.ir.graph import Graph, SectionKind
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.ranks import symbols_of_ranks
from sambasim.ir.schedule import Schedule, make, read_csv
from sambasim.ir.types import ALIGNMENT_BYTES, DTYPE_BYTES, SymbolKind, align
from sambasim.ir.verify import Progress, verify
from sambasim.options.compile import CompileOptions
from sambasim.simulation.memory import need_of, rows_of
from sambasim.units import counted


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
            work = work_of(graph, program.symbols)
            scaled = at_batch_size(work, program.batch_size, self.samples or program.batch_size)
            return replace(graph, sections=cut(graph, scaled, self.budget, self.level))

        return program.map_graphs(divided)


@dataclass(frozen=True, slots=True)
class Place:
    """Give every symbol its byte address in device memory: each group's flat tensors first, then other symbols, the
    reduce operand buffer last. Outputs and the tangent have no address. In a pipeline, each rank has a memory of its
    own: what several ranks hold comes first, at one address, and behind it what one rank holds alone."""

    title: ClassVar[str] = "place symbols in device memory"
    reaches: ClassVar[Progress] = Progress.PLACED

    def __call__(self, program: Program) -> Program:
        of_ranks = symbols_of_ranks(program)
        holders = {name: [rank for rank, held in enumerate(of_ranks) if name in held] for name in program.symbols}
        ends = [0] * len(of_ranks)

        def allocate(size_bytes: int, ranks: Sequence[int]) -> int:
            start = max(ends[rank] for rank in ranks)
            for rank in ranks:
                ends[rank] = align(start + size_bytes, ALIGNMENT_BYTES)
            return start

        kept = [s for s in program.symbols.values() if s.kind not in (SymbolKind.OUTPUT, SymbolKind.TANGENT)]
        kept.sort(key=lambda symbol: symbol.kind is SymbolKind.REDUCE_BUFFER)
        offsets: dict[str, int] = {}
        if len(of_ranks) > 1:
            in_groups = {name for group in program.groups for name in program.symbols_of(group)}
            shared = [one for one in kept if len(holders[one.name]) > 1 and one.name not in in_groups]
            offsets = {symbol.name: allocate(symbol.type.size_bytes, range(len(of_ranks))) for symbol in shared}
        regions = {}
        # Groups that several ranks hold come first, at one offset on all of them, so that no rank has a gap.
        for group in sorted(program.groups, key=lambda one: len(holders[one.members[0].parameter]) == 1):
            regions[group.name] = _place_group(group, program, holders, allocate, offsets)
        groups = [replace(group, regions=regions[group.name]) for group in program.groups]
        offsets |= {group.wrapper: group.regions["gradient"] for group in groups if group.wrapper is not None}
        for symbol in kept:
            if symbol.name not in offsets:
                offsets[symbol.name] = allocate(symbol.type.size_bytes, holders[symbol.name])
        symbols = {name: replace(symbol, offset=offsets.get(name)) for name, symbol in program.symbols.items()}
        return replace(program, symbols=symbols, groups=tuple(groups), device_bytes=max(ends))


def _place_group(
    group: ParameterGroup,
    program: Program,
    holders: Mapping[str, Sequence[int]],
    allocate: Callable[[int, Sequence[int]], int],
    offsets: dict[str, int],
) -> Mapping[str, int]:
    """The regions of `group`, each in the memory of the ranks that hold it. Adds the offsets of its symbols."""
    symbols_of = program.optimizers[group.optimizer].symbols_of
    regions = {
        region: allocate(group.region_type(region).size_bytes, holders[name])
        for region, name in symbols_of(group.members[0]).items()
    }
    for member in group.members:
        for region, name in symbols_of(member).items():
            offsets[name] = regions[region] + member.start * DTYPE_BYTES[group.region_type(region).dtype]
    return regions


@dataclass(frozen=True, slots=True)
class Fits:
    """Raises MachineError if a rank of the program does not fit on `budget`, with the fewest replicas that may run it
    and the passes that its schedule has in flight: see `costs.fit`."""

    title: ClassVar[str] = "check that it fits"
    reaches: ClassVar[Progress] = Progress.PLACED
    budget: Budget

    def __call__(self, program: Program) -> Program:
        for (part, work), row in zip(works_of_ranks(program), rows_of(program), strict=True):
            graph = part.leading
            check_chip(graph, work, self.budget)
            ends = [section.stop for section in graph.sections if section.kind in (SectionKind.FWD, SectionKind.BCKWD)]
            need = need_of(part, work, stage_ranges(work, ends), row=row)
            check_memory(graph, need, self.budget)
        return program


_SLICED_GRADIENTS = 2
"""The level of ZeRO from which replicas keep gradients in slices."""


def pipeline(
    options: CompileOptions,
    updates: Sequence[Update] | None = None,
    model: nn.Module | None = None,
    tell: Callable[[str], None] = lambda notice: None,
    samples: int | None = None,
) -> Sequence[Pass]:
    """The passes that `options` ask for. `model` may have a plan for tensor parallelism; `tell` gets notices. Sections
    are cut for a pass of `samples`, by default those of the program."""
    budget = budget_of(load_device(options.arch), options.num_tiles)
    passes: list[Pass] = [Partition(options.opt_level, budget, samples)]
    if options.recompute != "none" and not options.inference:
        sections = [Partition(options.opt_level, budget, samples)] if options.recompute == "sections" else []
        passes = [*sections, Recompute(options.recompute), *passes]
    if updates is None and options.optimizer is not None:
        updates = [Update(options.optimizer.name, options.optimizer.hyperparameters())]
    optimizers = None
    if updates and not options.inference:
        optimizers = AttachOptimizers(
            tuple(updates),
            options.stochastic_rounding,
            options.gradient_groups,
            scales_loss=options.dtype == "fp16",
            master_weights=options.keeps_master_weights,
        )
    if (schedule := schedule_of(options)) is not None:
        balances = optimizers is not None and options.zero < _SLICED_GRADIENTS  # slices need no balance
        of_tied = optimizers.state_bytes if optimizers is not None and balances else None
        shards = options.world_size * options.chips if options.zero else 1
        passes.insert(0, PipelineParallel(schedule, budget, of_tied, shards, samples))
    if options.tensor_parallel == "weight":
        of_model = {} if model is None else tp_plan_of(model)
        passes.insert(0, TensorParallel(options.n_chips, options.tensor_plan or {}, of_model, tell))
    if optimizers is not None:
        passes.append(optimizers)
    if options.data_parallel or options.chips > 1:
        passes.append(AddDataParallel(options.world_size, options.chips, options.zero, several=options.data_parallel))
    return [*passes, Place(), Fits(budget)]


def schedule_of(options: CompileOptions) -> Schedule | None:
    """None without a pipeline. Raises OptionError for a schedule that cannot be."""
    ranks, micro_batches = options.pipeline_stages, options.micro_batches
    if ranks == 1:
        return None
    if not options.schedule.endswith(".csv"):
        return make(options.schedule, ranks, micro_batches)
    found = read_csv(Path(options.schedule))
    if (found.ranks, found.micro_batches) != (ranks, micro_batches):
        fitting = f"--pipeline-stages {found.ranks} --micro-batches {found.micro_batches}"
        raise OptionError(
            f"{options.schedule} has {counted(found.ranks, 'rank')} and {found.micro_batches} micro-batches, not "
            f"{ranks} and {micro_batches}",
            remedy=fitting if found.ranks > 1 else f"write a row for each of the {ranks} ranks",
        )
    return found
