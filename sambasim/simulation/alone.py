"""One rank by itself, section by section. GRADNORM reads all gradients once, in bf16. OPT reads and writes what
`simulation/memory.py` counts: gradients are read alone, weights that have masters written alone. Host time does not
overlap with the device."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from sambasim.costs.cut import Level, cut
from sambasim.costs.fit import Need, check_chip, check_memory
from sambasim.costs.price import Bound, Load, SectionPrice, chip_bytes, load_of, price_of
from sambasim.costs.work import Row, Work, at_batch_size, device_bytes_of, stage_ranges, works_of_ranks
from sambasim.hardware.budget import Budget
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import MASTER, Program
from sambasim.ir.types import DTYPE_BYTES, SymbolKind
from sambasim.simulation.memory import need_of

_NOTHING = Load(0, 0, 0, 0, 0, 0, 1, 1, ())
_NARROW_BYTES = DTYPE_BYTES["bfloat16"]

MODEL_KINDS = (SectionKind.FWD, SectionKind.BCKWD)


@dataclass(frozen=True, slots=True)
class Tiers:
    """What lies in DDR where HBM is too small: shares of optimizer states, which go first, and of the rest; bytes."""

    states: float
    rest: float
    slow_bytes: int


def tiers_of(need: Need, states_bytes: int, budget: Budget) -> Tiers:
    if budget.behind is None or need.size_bytes <= budget.behind.fast_bytes:
        return Tiers(0.0, 0.0, 0)
    out_bytes, others_bytes = need.size_bytes - budget.behind.fast_bytes, need.size_bytes - states_bytes
    of_states = min(out_bytes, states_bytes)
    rest = (out_bytes - of_states) / others_bytes if others_bytes else 0.0
    return Tiers(of_states / states_bytes if states_bytes else 0.0, rest, out_bytes)


def slowed(budget: Budget, part: float) -> Budget:
    if budget.behind is None or not part:
        return budget
    s_per_byte = (1 - part) / budget.memory_bytes_per_s + part / budget.behind.bytes_per_s
    return replace(budget, memory_bytes_per_s=1 / s_per_byte)


@dataclass(frozen=True, slots=True)
class TimedSection:
    """A section, its load and its time on `budget`. `nodes`: start and stop in the graph; an update has none."""

    kind: SectionKind
    name: str
    load: Load
    price: SectionPrice
    budget: Budget
    nodes: tuple[int, int] = (0, 0)

    @property
    def unit_share(self) -> float:
        return self.price.units / self.budget.units

    @property
    def chip_share(self) -> float:
        """What its weights and buffers need of the memory on the chip; above 1, it is loaded part by part."""
        return chip_bytes(self.load, self.budget) / self.budget.chip_bytes


@dataclass(frozen=True)
class RankAlone:
    """A rank along pp, whose own program is `program`: the sections of a pass (`model`) and of the update. `work`: that
    of a pass; `sent_s`: host time of the inputs and outputs of a micro-step; `batch_size`: of a micro-step, which in a
    pipeline is one micro-batch."""

    program: Program
    work: Work
    model: tuple[TimedSection, ...]
    update: tuple[TimedSection, ...]
    budget: Budget
    batch_size: int
    sent_s: float
    need: Need
    tiers: Tiers
    micro_steps: int = 1

    @cached_property
    def sections(self) -> tuple[TimedSection, ...]:
        return (*self.model, *self.update)

    def runs(self, section: TimedSection) -> int:
        return self.micro_steps if section.kind in MODEL_KINDS else 1

    @property
    def starts_s(self) -> float:
        """Host time to start each section of a pass once."""
        return len(self.model) * self.budget.start_s

    @property
    def host_s(self) -> float:
        return self.micro_steps * (self.starts_s + self.sent_s)

    def device_s_of(self, section: TimedSection) -> float:
        """Of all its runs in a step."""
        return self.runs(section) * section.price.predicted_s

    @cached_property
    def device_s(self) -> float:
        return sum(map(self.device_s_of, self.sections))

    @property
    def predicted_s(self) -> float:
        return self.host_s + self.device_s

    @property
    def samples(self) -> int:
        return self.micro_steps * self.batch_size

    @property
    def samples_per_s(self) -> float:
        """Host time included."""
        return self.samples / self.predicted_s

    @property
    def device_s_by_kind(self) -> Mapping[SectionKind, float]:
        """In the order in which they run."""
        kinds = dict.fromkeys(section.kind for section in self.sections)
        return {kind: sum(self.device_s_of(each) for each in self.sections if each.kind is kind) for kind in kinds}

    @property
    def device_s_by_bound(self) -> Mapping[Bound, float]:
        timed = [(section.price.bound, self.device_s_of(section)) for section in self.sections]
        return {bound: sum((seconds for of, seconds in timed if of is bound), start=0.0) for bound in Bound}


def price_alone(
    program: Program, work: Work, budget: Budget, samples: int, micro_steps: int = 1, row: Row = None
) -> RankAlone:
    """`row`: what the rank does in a pipeline. Raises MachineError if the memory of `budget` is too small."""
    graph = program.leading
    in_pass, _ = pass_and_update(graph)
    ranges = stage_ranges(work, [section.stop for section in in_pass])
    need = need_of(program, work, samples, row)
    check_memory(graph, need, budget)
    tiers = tiers_of(need, program.held_bytes(SymbolKind.OPTIMIZER_STATE), budget)
    usual = slowed(budget, tiers.rest)
    model = []
    for section, (start, stop) in zip(in_pass, ranges, strict=True):
        load = load_of(work, start, stop, budget) if stop > start else _NOTHING
        price = price_of(load, usual if stop > start else replace(usual, load_s=0.0))
        model.append(TimedSection(section.kind, section.name, load, price, budget, (section.start, section.stop)))
    if not model:
        model.append(_timed(SectionKind.FWD, "nothing", _NOTHING, budget))
    symbols = [program.symbols[name] for name in (*graph.inputs, *(output.symbol for output in graph.outputs))]
    sent = [symbol.type for symbol in symbols if symbol.kind in (SymbolKind.INPUT, SymbolKind.OUTPUT)]
    sent_s = sum(map(device_bytes_of, sent)) * samples / program.batch_size / budget.host_bytes_per_s
    rank = RankAlone(program, work, tuple(model), (), budget, samples, sent_s, need, tiers, micro_steps)
    return sliced(rank, 1)


def sliced(rank: RankAlone, replicas: int) -> RankAlone:
    """`rank`, which updates its slice of so many."""
    program, budget, tiers = rank.program, rank.budget, rank.tiers
    if program.training is None:
        return rank
    sections = []
    if any(section.kind is SectionKind.GRADNORM for section in program.training.sections):
        read_bytes = _NARROW_BYTES * sum(group.numel for group in program.groups) // replicas
        load = Load(read_bytes, 0, 0, read_bytes, 0, 0, 1, 1, ())
        sections.append(_timed(SectionKind.GRADNORM, "gradnorm", load, slowed(budget, tiers.rest)))
    for group in program.groups:
        optimizer = program.optimizers[group.optimizer]
        each = {region: DTYPE_BYTES[group.region_type(region).dtype] for region in optimizer.regions}
        numel, whole = group.numel // replicas, sum(each.values())
        read_bytes = numel * (whole - (each["parameter"] if MASTER in each else 0))
        written_bytes = numel * (whole - each["gradient"])
        of_states = 2 * numel * sum(each[state] for state in optimizer.states) / max(read_bytes + written_bytes, 1)
        rate = slowed(budget, of_states * tiers.states + (1 - of_states) * tiers.rest)
        load = Load(read_bytes, written_bytes, 0, read_bytes, 0, 0, 1, 1, ())
        sections.append(_timed(SectionKind.OPT, group.name, load, rate))
    return replace(rank, update=tuple(sections))


def _timed(kind: SectionKind, name: str, load: Load, budget: Budget) -> TimedSection:
    return TimedSection(kind, name, load, price_of(load, replace(budget, load_s=0.0)), budget)  # all run one program


def price_ranks(
    program: Program, budget: Budget, samples: int | None = None, micro_steps: int = 1, level: Level | None = None
) -> tuple[RankAlone, ...]:
    """Each rank along pp, for passes of `samples`. With a `level`, sections are cut again; else they are as compiled.
    Raises MachineError if a rank does not fit, PefError for invalid arguments."""
    samples = samples or program.batch_size

    def priced(own: Program, work: Work, row: Row, cutting: Budget) -> RankAlone:
        if level is not None:
            graph = cut(own.leading, work, cutting, level)
            own = replace(own, evaluation=graph) if own.training is None else replace(own, training=graph)
        return price_alone(own, work, budget, samples, micro_steps, row)

    def fastest(own: Program, compiled: Work, row: Row) -> RankAlone:
        work = at_batch_size(compiled, own.batch_size, samples)
        check_chip(own.leading, work, budget)
        rank = priced(own, work, row, budget)
        if level is None or not rank.tiers.rest:
            return rank
        # Another cut may be faster if not everything fits into HBM.
        other = priced(own, work, row, slowed(budget, rank.tiers.rest))
        return min(rank, other, key=lambda each: each.predicted_s)

    return tuple(fastest(*rank) for rank in works_of_ranks(program))
