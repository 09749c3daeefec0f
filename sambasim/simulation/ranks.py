"""One rank of a mesh, on a device of its own: the cost of its actions, its update and its sync."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sambasim.costs.fit import check_chip
from sambasim.costs.work import at_batch_size, works_of_ranks
from sambasim.hardware.budget import Budget, Calibration
from sambasim.hardware.placement import Placement
from sambasim.ir.dataflow import spans_of_actions
from sambasim.ir.graph import SectionKind
from sambasim.ir.mesh import DATA_PARALLEL, Mesh
from sambasim.ir.program import Program
from sambasim.ir.schedule import ActionKind
from sambasim.ir.types import SymbolKind
from sambasim.simulation.memory import rows_of
from sambasim.simulation.scaling import ScaledStep, Span, Track, scale, syncs_of
from sambasim.simulation.step import MODEL_KINDS, PredictedStep, pieces_as_compiled, price_pieces
from sambasim.simulation.sync import (
    GATHERS_IN_PASSES,
    SyncPath,
    Traffic,
    copies_of,
    moves_in_passes,
    traffic_of,
    zero_of,
)


@dataclass(frozen=True, slots=True)
class Cost:
    """The seconds of an action: on the device, on the host, and in messages by mesh axis."""

    device_s: float
    host_s: float
    messages: Mapping[str, Traffic]

    @property
    def predicted_s(self) -> float:
        return self.device_s + self.host_s + sum(one.predicted_s for one in self.messages.values())


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank along pp: its part of the program, what it runs for one micro-batch, the cost of each of its actions by
    kind and stage, and, in `scaled`, what follows the last micro-batch. `copies` are of tied parameters, by symbol."""

    program: Program
    alone: PredictedStep
    costs: Mapping[tuple[ActionKind, int], Cost]
    scaled: ScaledStep
    copies: Mapping[str, Traffic]
    resident: frozenset[str]

    @property
    def update_s(self) -> float:
        """With copies."""
        sections = [one.price.predicted_s for one in self.scaled.step.sections if one.kind not in MODEL_KINDS]
        return sum(sections) + sum(one.predicted_s for one in self.copies.values())

    @property
    def after_s(self) -> float:
        """Update, and sync that does not overlap with the passes."""
        return self.update_s + self.scaled.exposed_sync_s

    def spans_after(self, end_s: float) -> list[Span]:
        """Update and sync, if the last pass ends at `end_s`; sync that overlaps with it begins before. Gradients are
        copied before the update, and parameters when all is done."""
        backward_s = max(span.stop_s for span in self.scaled.spans if span.kind in MODEL_KINDS)
        spans = self._copied(SectionKind.REDUCE, SymbolKind.GRADIENT, end_s)
        started_s = max((span.stop_s for span in spans), default=end_s)
        for span in self.scaled.spans:
            if span.kind not in MODEL_KINDS and span.track is not Track.HOST:
                later_s = (started_s if span.start_s >= backward_s else end_s) - backward_s
                spans.append(replace(span, start_s=span.start_s + later_s, stop_s=span.stop_s + later_s))
        ended_s = max(span.stop_s for span in spans)
        return spans + self._copied(SectionKind.GATHER, SymbolKind.PARAMETER, ended_s)

    def _copied(self, kind: SectionKind, of: SymbolKind, start_s: float) -> list[Span]:
        spans = []
        for name, traffic in self.copies.items():
            if self.program.symbols[name].kind is of:
                spans.append(Span(Track.LINKS, kind, f"copy of {name}", start_s, start_s + traffic.predicted_s))
                start_s += traffic.predicted_s
        return spans


@dataclass(frozen=True, slots=True)
class PricedRank:
    """One rank along pp, what it runs for one micro-batch, wherever the ranks are, and the values that are the same for
    each sample."""

    program: Program
    alone: PredictedStep
    resident: frozenset[str]


def price_ranks(
    program: Program, budget: Budget, calibration: Calibration, samples: int | None = None
) -> tuple[PricedRank, ...]:
    """The priced program of each rank along pp, in order, for passes of `samples`, by default those of the program.
    Raises MachineError if one does not fit, PefError for invalid arguments."""
    samples = samples or program.batch_size
    found = []
    for (own, compiled), row in zip(works_of_ranks(program), rows_of(program), strict=True):
        graph = own.leading
        work = at_batch_size(compiled, own.batch_size, samples)
        check_chip(graph, work, budget)
        pieces = pieces_as_compiled(graph, work)
        step = price_pieces(own, work, pieces, budget, calibration, samples, 1, row)
        found.append(PricedRank(own, step, work.resident))
    return tuple(found)


def rank_step(priced: PricedRank, placement: Placement, path: SyncPath, mesh: Mesh, rank: int) -> RankStep:
    """The step of `rank`, which is the first of those that are alike along other axes than pp."""
    program, alone = priced.program, priced.alone
    graph = program.leading
    model = [section for section in graph.sections if section.kind in MODEL_KINDS]
    replicas = part_of(placement, mesh.group(rank, DATA_PARALLEL))
    scaled = scale(program, alone, replicas, path, in_passes=False)
    gathered = _gathered(program, alone, replicas) if scaled.path is SyncPath.HOST else []
    copies = copies_of(graph, program, placement, mesh, rank)
    costs = {}
    spans = spans_of_actions(model)
    forwards = sum(kind is ActionKind.FORWARD for kind, _ in spans)  # inputs and outputs are sent once for all of them
    for (kind, stage), (start, stop) in spans.items():
        sections = model[start:stop]
        sent = traffic_of(sections, graph, program, placement, mesh, rank, alone.batch_size, priced.resident)
        messages = dict(sent)
        if parameters := gathered[start:stop]:
            messages[DATA_PARALLEL] = sum(parameters, Traffic())
        device_s = sum(one.price.predicted_s for one in alone.sections[start:stop])
        sent_s = alone.sent_s / forwards if kind is ActionKind.FORWARD else 0.0
        costs[kind, stage] = Cost(device_s, (stop - start) * alone.start_s + sent_s, messages)
    return RankStep(program, alone, _complete(costs), scaled, copies, priced.resident)


def _gathered(program: Program, alone: PredictedStep, replicas: Placement) -> Sequence[Traffic]:
    """By section of a pass, the parameters that `replicas` gather before it over their hosts, by ZeRO 3."""
    if zero_of(program) < GATHERS_IN_PASSES:
        return []
    syncs = syncs_of(program, alone, replicas, SyncPath.HOST, GATHERS_IN_PASSES)
    return [sum((syncs[name].gather for name in one.gathered), Traffic()) for one in moves_in_passes(program)]


def _complete(costs: Mapping[tuple[ActionKind, int], Cost]) -> Mapping[tuple[ActionKind, int], Cost]:
    """`costs`, with nothing for kinds of actions that no section belongs to."""
    stages = {stage for _, stage in costs}
    return {(kind, stage): Cost(0.0, 0.0, {}) for kind in ActionKind for stage in stages} | dict(costs)


def part_of(placement: Placement, ranks: Sequence[int]) -> Placement:
    """The placement of some ranks."""
    if placement.node_of is None and len(ranks) == placement.replicas:
        return placement
    locations = placement.locations()
    return replace(placement, replicas=len(ranks), node_of=tuple(locations[rank].node for rank in ranks))
