"""One rank of a job, on a device of its own: its sections, priced wherever it is; then the cost of its actions, its
update and its sync."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from sambasim.costs.cut import Level, cut
from sambasim.costs.fit import check_chip
from sambasim.costs.work import Work, at_batch_size, works_of_ranks
from sambasim.hardware.budget import Budget
from sambasim.hardware.placement import Placement
from sambasim.ir.dataflow import pass_and_update, spans_of_actions
from sambasim.ir.graph import SectionKind
from sambasim.ir.mesh import DATA_PARALLEL, Mesh
from sambasim.ir.program import Program
from sambasim.ir.schedule import Action, ActionKind
from sambasim.ir.types import SymbolKind
from sambasim.simulation.alone import MODEL_KINDS, RankAlone, price_alone, sections_of_pass, slowed
from sambasim.simulation.memory import rows_of
from sambasim.simulation.scaling import Span, SyncedRank, Track, syncs_of, with_sync
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
class PricedRank:
    """One rank along pp, wherever the ranks are: its program, what it runs for one pass and the update, and the values
    that are the same for each sample."""

    program: Program
    alone: RankAlone
    resident: frozenset[str]


def price_ranks(
    program: Program, budget: Budget, samples: int | None = None, micro_steps: int = 1, level: Level | None = None
) -> tuple[PricedRank, ...]:
    """Each rank along pp, in order, for passes of `samples`, by default those of the program. With a `level`, sections
    are cut again; else they are as compiled. Raises MachineError if a rank does not fit, PefError for invalid
    arguments."""
    samples = samples or program.batch_size

    def priced(own: Program, work: Work, row: Sequence[Action] | None, cutting: Budget) -> PricedRank:
        if level is not None:
            own = _cut_again(own, work, cutting, level)
        alone = price_alone(own, work, budget, samples, micro_steps, row)
        return PricedRank(own, alone, work.resident)

    def fastest(own: Program, compiled: Work, row: Sequence[Action] | None) -> PricedRank:
        work = at_batch_size(compiled, own.batch_size, samples)
        check_chip(own.leading, work, budget)
        rank = priced(own, work, row, budget)
        if level is None or not rank.alone.tiers.rest:
            return rank
        # Another cut may be faster if not everything fits into HBM.
        other = priced(own, work, row, slowed(budget, rank.alone.tiers.rest))
        return min(rank, other, key=lambda each: each.alone.predicted_s)

    ranks = zip(works_of_ranks(program), rows_of(program), strict=True)
    return tuple(fastest(own, compiled, row) for (own, compiled), row in ranks)


def _cut_again(program: Program, work: Work, budget: Budget, level: Level) -> Program:
    graph = program.leading
    _, update = pass_and_update(graph)
    graph = replace(graph, sections=(*cut(graph, work, budget, level), *update))
    return replace(program, evaluation=graph) if program.training is None else replace(program, training=graph)


@dataclass(frozen=True, slots=True)
class Cost:
    """The seconds of an action: on the device, on the host, and in messages by mesh axis."""

    device_s: float = 0.0
    host_s: float = 0.0
    messages: Mapping[str, Traffic] = field(default_factory=dict)

    @property
    def messages_s(self) -> float:
        return sum(traffic.predicted_s for traffic in self.messages.values())

    @property
    def predicted_s(self) -> float:
        return self.device_s + self.host_s + self.messages_s

    def __add__(self, other: "Cost") -> "Cost":
        messages = dict(self.messages)
        for axis, traffic in other.messages.items():
            messages[axis] = messages[axis] + traffic if axis in messages else traffic
        return Cost(self.device_s + other.device_s, self.host_s + other.host_s, messages)

    def __mul__(self, times: int) -> "Cost":
        messages = {axis: traffic * times for axis, traffic in self.messages.items()}
        return Cost(times * self.device_s, times * self.host_s, messages)


@dataclass(frozen=True, slots=True)
class RankStep(PricedRank):
    """One rank along pp of a job: the cost of each of its actions by kind and stage, and, in `synced`, what follows the
    last pass. `copies` are of tied parameters, by symbol."""

    costs: Mapping[tuple[ActionKind, int], Cost]
    synced: SyncedRank
    copies: Mapping[str, Traffic]

    @property
    def update_s(self) -> float:
        """With copies."""
        sections = [
            section.price.predicted_s for section in self.synced.step.sections if section.kind not in MODEL_KINDS
        ]
        return sum(sections) + sum(traffic.predicted_s for traffic in self.copies.values())

    @property
    def after_s(self) -> float:
        """Update, and sync that does not overlap with the passes."""
        return self.update_s + self.synced.exposed_sync_s

    def spans_after(self, end_s: float) -> list[Span]:
        """Update and sync, if the last pass ends at `end_s`; sync that overlaps with it begins before. Gradients are
        copied before the update, and parameters when all is done."""
        backward_s = max(span.stop_s for span in self.synced.spans if span.kind in MODEL_KINDS)
        spans = self._copied(SectionKind.REDUCE, SymbolKind.GRADIENT, end_s)
        started_s = max((span.stop_s for span in spans), default=end_s)
        for span in self.synced.spans:
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


def rank_step(priced: PricedRank, placement: Placement, path: SyncPath, mesh: Mesh, rank: int) -> RankStep:
    """The step of `rank`, which is the first of those that are alike along other axes than pp."""
    program, alone = priced.program, priced.alone
    graph = program.leading
    model, is_replica = sections_of_pass(graph), program.ranks_of_replica == 1
    replicas = part_of(placement, mesh.group(rank, DATA_PARALLEL))
    synced = with_sync(program, alone, replicas, path, in_passes=is_replica)
    gathered = [] if is_replica or synced.path is not SyncPath.HOST else _gathered(program, alone, replicas)
    costs = {}
    spans = spans_of_actions(model) or {(ActionKind.FORWARD, 0): (0, 1)}  # which starts nothing
    forwards = sum(kind is ActionKind.FORWARD for kind, _ in spans)  # inputs and outputs are sent once for all of them
    for (kind, stage), (start, stop) in spans.items():
        sections = model[start:stop]
        sent = traffic_of(sections, graph, program, placement, mesh, rank, alone.batch_size, priced.resident)
        messages = dict(sent)
        if parameters := gathered[start:stop]:
            messages[DATA_PARALLEL] = sum(parameters, Traffic())
        device_s = sum(section.price.predicted_s for section in alone.sections[start:stop])
        sent_s = alone.sent_s / forwards if kind is ActionKind.FORWARD else 0.0
        costs[kind, stage] = Cost(device_s, (stop - start) * alone.start_s + sent_s, messages)
    copies = copies_of(graph, program, placement, mesh, rank)
    return RankStep(program, alone, priced.resident, costs, synced, copies)


def _gathered(program: Program, alone: RankAlone, replicas: Placement) -> Sequence[Traffic]:
    """By section of a pass, the parameters that `replicas` gather before it over their hosts, by ZeRO 3."""
    if zero_of(program) < GATHERS_IN_PASSES:
        return []
    syncs = syncs_of(program, alone, replicas, SyncPath.HOST, GATHERS_IN_PASSES)
    return [sum((syncs[name].gather for name in moves.gathered), Traffic()) for moves in moves_in_passes(program)]


def part_of(placement: Placement, ranks: Sequence[int]) -> Placement:
    """The placement of some ranks."""
    if placement.node_of is None and len(ranks) == placement.replicas:
        return placement
    locations = placement.locations()
    return replace(placement, replicas=len(ranks), node_of=tuple(locations[rank].node for rank in ranks))
