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
from sambasim.simulation.step import MODEL_KINDS, PredictedStep, TimedSection, updates
from sambasim.simulation.sync import SyncPath
from sambasim.simulation.tiers import slowed, tiers_of
from sambasim.simulation.timeline import Track


@dataclass(frozen=True)
class CompiledStep:
    """A step by all replicas of a job.

    start_s: host time for each section
    sent_s: host time for inputs and outputs of a micro-step
    """

    scaled: ScaledStep
    start_s: float
    sent_s: float

    @property
    def model_s(self) -> float:
        """Forward and backward of all micro-steps, on the device."""
        return sum(self.of_kind_s(kind) for kind in MODEL_KINDS)

    @property
    def update_s(self) -> float:
        """GRADNORM and OPT."""
        return self.scaled.step.device_s - self.model_s

    @property
    def forward_s(self) -> float:
        """The forward of one micro-step alone, host time included."""
        times_s = self._times_s(SectionKind.FWD)
        return len(times_s) * self.start_s + self.sent_s + sum(times_s)

    @property
    def graph_s(self) -> float:
        """All sections one after the other, without the host: nothing of the sync is hidden."""
        return self.scaled.step.device_s + self.scaled.sync_s

    def of_kind_s(self, kind: SectionKind) -> float:
        """All sections of `kind` in the whole step: also of what is exchanged, hidden or not."""
        return sum(self._times_s(kind)) * (self.scaled.step.micro_steps if kind in MODEL_KINDS else 1)

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
            return [one.predicted_s for one in self.scaled.spans if one.track is Track.LINKS and one.kind == kind]
        return [one.price.predicted_s for one in self.scaled.step.sections if one.kind is kind]


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
        load, nodes = load_of(work, *stages, budget), (section.start, section.stop)
        timed.append(TimedSection(section.kind, section.name, load, price_of(load, rate), nodes))
    launched = micro_steps * len(timed)
    update = updates(program, budget, tiers, 1)
    start_s = calibration.host_s_per_section.value
    sent_s = _sent_bytes(graph, program) / calibration.host_bytes_per_s.value
    alone = PredictedStep(
        sections=(*timed, *update),
        budget=budget,
        batch_size=program.batch_size,
        host_s=(launched + len(update)) * start_s + micro_steps * sent_s,
        need=need,
        tiers=tiers,
        micro_steps=micro_steps,
    )
    return CompiledStep(scale(program, alone, placement, path), start_s, sent_s)


def _sent_bytes(graph: Graph, program: Program) -> int:
    """Inputs and outputs, as the device holds them."""
    symbols = [program.symbols[name] for name in (*graph.inputs, *(output.symbol for output in graph.outputs))]
    return sum(
        device_bytes_of(symbol.type) for symbol in symbols if symbol.kind in (SymbolKind.INPUT, SymbolKind.OUTPUT)
    )
