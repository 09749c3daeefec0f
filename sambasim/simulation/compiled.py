"""The predicted step of a PEF with its own sections; `sambasim.simulation.step` partitions the graph again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sambasim.costs.fit import check_chip
from sambasim.costs.work import work_of
from sambasim.hardware.budget import Budget, Calibration
from sambasim.hardware.placement import Placement
from sambasim.ir.graph import Section, SectionKind
from sambasim.ir.program import Program
from sambasim.simulation.scaling import ScaledStep, scale
from sambasim.simulation.step import MODEL_KINDS, pieces_as_compiled, price_pieces
from sambasim.simulation.sync import SyncPath


@dataclass(frozen=True)
class CompiledStep:
    scaled: ScaledStep

    @property
    def host_s(self) -> float:
        return self.scaled.step.host_s

    @property
    def model_s(self) -> float:
        """Forward and backward of all micro-steps, without host time."""
        return sum(self.of_kind_s(kind) for kind in MODEL_KINDS)

    @property
    def update_s(self) -> float:
        return self.scaled.step.device_s - self.model_s

    @property
    def forward_s(self) -> float:
        """One forward, host time included."""
        times_s, step = self.scaled.times_s(SectionKind.FWD), self.scaled.step
        return len(times_s) * step.start_s + step.sent_s + sum(times_s)

    @property
    def graph_s(self) -> float:
        """All sections one after the other, without host time and without overlap of the sync."""
        return self.scaled.step.device_s + self.scaled.sync_s

    def of_kind_s(self, kind: SectionKind) -> float:
        """All sections of `kind` in the whole step; of REDUCE and GATHER also the overlapped part."""
        return sum(self.scaled.times_s(kind)) * (self.scaled.step.micro_steps if kind in MODEL_KINDS else 1)

    def by_section_s(self, sections: Sequence[Section]) -> Mapping[int, float]:
        """Seconds of one execution of each of `sections`, by section index. Those without a prediction are left out."""
        found: dict[int, float] = {}
        for kind in SectionKind:
            indices = [section.index for section in sections if section.kind is kind]
            times_s = self.scaled.times_s(kind)
            if len(indices) == 1 and times_s:
                found[indices[0]] = sum(times_s)
            elif len(indices) == len(times_s):
                found |= dict(zip(indices, times_s, strict=True))
        return found


def predict_compiled(
    program: Program,
    budget: Budget,
    calibration: Calibration,
    placement: Placement,
    path: SyncPath,
    micro_steps: int = 1,
) -> CompiledStep:
    """The step of `program` on all replicas of `placement`, of one rank each. Raises MachineError if it does not
    fit, PefError for invalid arguments."""
    graph = program.training or program.evaluation
    work = work_of(graph, program.symbols)
    check_chip(graph, work, budget)
    pieces = pieces_as_compiled(graph, work)
    alone = price_pieces(program, work, pieces, budget, calibration, program.batch_size, micro_steps)
    return CompiledStep(scale(program, alone, placement, path))
