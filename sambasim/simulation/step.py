"""One step of one replica on a device, section by section.

    FWD, BCKWD   pipelines: see `sambasim.costs.price`
    GRADNORM     all gradients are read once
    OPT          parameters and states are read and written, gradients read, all in float32
    REDUCE,      nothing for one replica: what the others cost is not predicted yet
    GATHER

Host time comes on top, and is not predicted: it does not overlap with the device in the published measurements.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from sambasim.costs.cut import Level, cut
from sambasim.costs.load import Load, load_of
from sambasim.costs.price import Bound, SectionPrice, price_of
from sambasim.costs.work import work_of
from sambasim.hardware.budget import Budget
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import DTYPE_BYTES

_NOTHING = Load(0, 0, 0, 0, 0, 1, 1, ())
_WIDE_BYTES = DTYPE_BYTES["float32"]


@dataclass(frozen=True, slots=True)
class TimedSection:
    """A section with what it asks for and its predicted seconds. `operators` counts those that cost something."""

    kind: SectionKind
    name: str
    load: Load
    price: SectionPrice

    @property
    def operators(self) -> int:
        """Those that cost something."""
        return self.load.stages


@dataclass(frozen=True)
class PredictedStep:
    """A step, or the forward of a program without a training step: its sections in order, and the budget they have."""

    sections: tuple[TimedSection, ...]
    budget: Budget
    batch_size: int

    @cached_property
    def predicted_s(self) -> float:
        """Seconds of device time."""
        return sum(section.price.predicted_s for section in self.sections)

    @property
    def samples_per_s(self) -> float:
        """Of one replica."""
        return self.batch_size / self.predicted_s

    @property
    def predicted_s_by_kind(self) -> Mapping[SectionKind, float]:
        """Seconds by kind of section, in the order in which they run."""
        seconds: dict[SectionKind, float] = {}
        for section in self.sections:
            seconds[section.kind] = seconds.get(section.kind, 0.0) + section.price.predicted_s
        return seconds

    @property
    def predicted_s_by_bound(self) -> Mapping[Bound, float]:
        """Seconds by what sections wait for most."""
        seconds = dict.fromkeys(Bound, 0.0)
        for section in self.sections:
            seconds[section.price.bound] += section.price.predicted_s
        return seconds


def predict_step(program: Program, budget: Budget, level: Level) -> PredictedStep:
    """The step of `program`, cut into sections for `budget` as `level` says: o0, o1 or o3. Raises PefError for an
    operator that is given what it does not take."""
    graph = program.training or program.evaluation
    work = work_of(graph, program.symbols)
    sections = []
    for piece in cut(graph, work, budget, level):
        start, stop = piece.stages
        load = load_of(work, start, stop) if stop > start else _NOTHING
        sections.append(TimedSection(piece.kind, piece.name, load, price_of(load, budget)))
    if program.training is not None:
        sections += _update(program, budget)
    return PredictedStep(tuple(sections), budget, program.batch_size)


def _update(program: Program, budget: Budget) -> Iterator[TimedSection]:
    training = program.training
    if training is not None and any(section.kind is SectionKind.GRADNORM for section in training.sections):
        read_bytes = _WIDE_BYTES * sum(group.numel for group in program.groups)
        yield _timed(SectionKind.GRADNORM, "gradnorm", read_bytes, 0, budget)
    for group in program.groups:
        kept = 1 + len(program.optimizers[group.optimizer].states)
        read_bytes, written_bytes = (kept + 1) * _WIDE_BYTES * group.numel, kept * _WIDE_BYTES * group.numel
        yield _timed(SectionKind.OPT, group.name, read_bytes, written_bytes, budget)


def _timed(kind: SectionKind, name: str, read_bytes: int, written_bytes: int, budget: Budget) -> TimedSection:
    load = Load(read_bytes, written_bytes, read_bytes, 0, 0, 1, 1, ())
    return TimedSection(kind, name, load, price_of(load, budget))
