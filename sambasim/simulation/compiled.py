"""The step of a PEF by the sections that it has: nothing is cut again, as `sambasim.simulation.step` does.

Where the budget is that for which the PEF was compiled, both give the same.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sambasim.costs.fit import check_chip, check_memory, need_of, states_bytes
from sambasim.costs.load import load_of
from sambasim.costs.price import price_of
from sambasim.costs.work import device_bytes_of, stage_ranges, work_of
from sambasim.hardware.budget import Budget
from sambasim.hardware.calibration import Calibration
from sambasim.hardware.placement import Placement
from sambasim.ir.graph import Graph, Section, SectionKind
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.simulation.scaling import ScaledStep, scale
from sambasim.simulation.step import PredictedStep, TimedSection, updates
from sambasim.simulation.sync import SyncPath
from sambasim.simulation.tiers import slowed, tiers_of
from sambasim.simulation.timeline import Track

MODEL_KINDS = (SectionKind.FWD, SectionKind.BCKWD)
"""Sections that run once in each micro-step."""


@dataclass(frozen=True)
class CompiledStep:
    """A step of several micro-steps, by all replicas of a job.

    one: the step if it had one micro-step
    start_s: host time for each section
    sent_s: host time for inputs and outputs of a micro-step
    """

    one: ScaledStep
    micro_steps: int
    start_s: float
    sent_s: float

    @property
    def model_s(self) -> float:
        """Forward and backward of all micro-steps, on the device."""
        return self.micro_steps * sum(self.of_kind_s(kind) for kind in MODEL_KINDS)

    @property
    def update_s(self) -> float:
        """GRADNORM and OPT."""
        return self.one.step.device_s - self.model_s / self.micro_steps

    @property
    def host_s(self) -> float:
        """Host time of the whole step."""
        again_s = sum(self._starts_s(kind) for kind in MODEL_KINDS) + self.sent_s
        return self.one.step.host_s + (self.micro_steps - 1) * again_s

    @property
    def forward_s(self) -> float:
        """The forward of one micro-step alone, host time included."""
        return self._starts_s(SectionKind.FWD) + self.sent_s + self.of_kind_s(SectionKind.FWD)

    @property
    def graph_s(self) -> float:
        """All sections one after the other, without the host: nothing of the sync is hidden."""
        return self.model_s + self.update_s + self.one.sync_s

    @property
    def predicted_s(self) -> float:
        """Of the whole step: gradients are synced in the last micro-step."""
        return self.host_s + self.model_s + self.update_s + self.one.exposed_sync_s

    @property
    def samples_per_s(self) -> float:
        """Of all replicas."""
        return self.one.placement.replicas * self.micro_steps * self.one.step.batch_size / self.predicted_s

    def of_kind_s(self, kind: SectionKind) -> float:
        """All sections of `kind`, each of them once: also of what is exchanged, hidden or not."""
        return sum(self._times_s(kind))

    def by_section_s(self, sections: Sequence[Section]) -> Mapping[int, float]:
        """By index: what each of `sections` takes once. Those for which nothing is predicted are not there."""
        found: dict[int, float] = {}
        for kind in SectionKind:
            indices = [section.index for section in sections if section.kind is kind]
            times_s = self._times_s(kind)
            if len(indices) == 1 and times_s:
                found[indices[0]] = sum(times_s)
            elif len(indices) == len(times_s):
                found |= dict(zip(indices, times_s, strict=True))
        return found

    def _times_s(self, kind: SectionKind) -> list[float]:
        if kind in (SectionKind.REDUCE, SectionKind.GATHER):
            return [one.predicted_s for one in self.one.spans if one.track is Track.LINKS and one.kind == kind]
        return [one.price.predicted_s for one in self.one.step.sections if one.kind is kind]

    def _starts_s(self, kind: SectionKind) -> float:
        return self.start_s * len(self._times_s(kind))


def predict_compiled(
    program: Program,
    budget: Budget,
    calibration: Calibration,
    placement: Placement,
    path: SyncPath,
    micro_steps: int = 1,
) -> CompiledStep:
    """The step of `program` on `budget` by its own sections, by all replicas of `placement`.

    Raises MachineError for what does not fit on `budget`, and PefError for an operator that is given what it does not
    take.
    """
    graph = program.training or program.evaluation
    model = [section for section in graph.sections if section.kind in MODEL_KINDS]
    work = work_of(graph, program.symbols)
    check_chip(graph, work, budget)
    ranges = stage_ranges(work, [section.stop for section in model])
    need = need_of(program, work, ranges)
    check_memory(graph, need, budget)
    tiers = tiers_of(need, states_bytes(program.symbols.values()), budget)
    rate = slowed(budget, tiers.rest)
    timed = []
    for section, stages in zip(model, ranges, strict=True):
        load, nodes = load_of(work, *stages), (section.start, section.stop)
        timed.append(TimedSection(section.kind, section.name, load, price_of(load, rate), nodes))
    timed += updates(program, budget, tiers, 1)
    start_s = calibration.host_s_per_section.value
    sent_s = _sent_bytes(graph, program) / calibration.host_bytes_per_s.value
    alone = PredictedStep(
        sections=tuple(timed),
        budget=budget,
        batch_size=program.batch_size,
        host_s=len(timed) * start_s + sent_s,
        need=need,
        tiers=tiers,
    )
    return CompiledStep(scale(program, alone, placement, path), micro_steps, start_s, sent_s)


def _sent_bytes(graph: Graph, program: Program) -> int:
    """Inputs and outputs, as the device holds them."""
    symbols = [program.symbols[name] for name in (*graph.inputs, *(output.symbol for output in graph.outputs))]
    return sum(
        device_bytes_of(symbol.type) for symbol in symbols if symbol.kind in (SymbolKind.INPUT, SymbolKind.OUTPUT)
    )
