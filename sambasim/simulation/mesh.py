"""The predicted step of a replica of several ranks, each on a device of its own: the stages of a pipeline, by its
schedule, and parts of tensors on several chips.

Messages do not overlap with operators, and the time of a section includes the host's to start it. Nobody has published
such steps of RDUs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sambasim.costs.fit import check_chip
from sambasim.costs.work import work_of
from sambasim.errors import InternalError
from sambasim.hardware.budget import Budget, Calibration
from sambasim.hardware.placement import Placement
from sambasim.ir.dataflow import spans_of_actions
from sambasim.ir.graph import SectionKind
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, Mesh, copy_mesh, mesh_of
from sambasim.ir.program import Program
from sambasim.ir.schedule import Action, ActionKind, Schedule, make, timeline
from sambasim.ir.schedule import Span as TimedAction
from sambasim.ir.stages import of_rank
from sambasim.ir.types import SymbolKind
from sambasim.simulation.messages import Traffic, copies_of, traffic_of
from sambasim.simulation.scaling import ScaledStep, Span, Track, scale
from sambasim.simulation.step import MODEL_KINDS, PredictedStep, check_predictable, pieces_as_compiled, price_pieces
from sambasim.simulation.sync import SyncPath


def has_several_ranks(program: Program) -> bool:
    """Whether one copy of the model has several ranks; chips that share a batch have whole copies."""
    return copy_mesh(program.mesh).world_size > 1


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

    @property
    def update_s(self) -> float:
        """With copies."""
        sections = [one.price.predicted_s for one in self.scaled.step.sections if one.kind not in MODEL_KINDS]
        return sum(sections) + sum(one.predicted_s for one in self.copies.values())

    @property
    def after_s(self) -> float:
        """Update, and sync that does not overlap with the backward."""
        return self.update_s + self.scaled.exposed_sync_s

    def spans_after(self, end_s: float) -> list[Span]:
        """Update and sync, if the last pass ends at `end_s`; sync that overlaps with it begins before. Gradients are
        copied before the update, and parameters when all is done."""
        backward_s = max(span.stop_s for span in self.scaled.spans if span.kind in MODEL_KINDS)
        spans = self._copied(SectionKind.REDUCE, SymbolKind.GRADIENT, end_s)
        copied_s = sum(span.predicted_s for span in spans)
        for span in self.scaled.spans:
            if span.kind not in MODEL_KINDS and span.track is not Track.HOST:
                later_s = end_s - backward_s + (copied_s if span.start_s >= backward_s else 0.0)
                spans.append(replace(span, start_s=span.start_s + later_s, stop_s=span.stop_s + later_s))
        ended_s = max((span.stop_s for span in spans), default=end_s)
        return spans + self._copied(SectionKind.GATHER, SymbolKind.PARAMETER, ended_s)

    def _copied(self, kind: SectionKind, of: SymbolKind, start_s: float) -> list[Span]:
        spans = []
        for name, traffic in self.copies.items():
            if self.program.symbols[name].kind is of:
                spans.append(Span(Track.LINKS, kind, f"copy of {name}", start_s, start_s + traffic.predicted_s))
                start_s += traffic.predicted_s
        return spans


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The parts of a rank's step, which add up to it. `idle_s`: waiting for other stages; `exposed_sync_s`: sync that
    does not overlap with the backward, with waiting for the rank that ends last."""

    device_s: float
    host_s: float
    messages: Mapping[str, Traffic]
    idle_s: float
    update_s: float
    exposed_sync_s: float

    @property
    def busy_s(self) -> float:
        """In passes, on the device and on the host."""
        return self.device_s + self.host_s


@dataclass(frozen=True)
class MeshStep:
    """A step of all replicas. Ranks that differ along other axes than pp have the same times. Unless it says otherwise,
    a time is that of rank 0, as in a measured step."""

    program: Program
    mesh: Mesh
    budget: Budget
    placement: Placement
    schedule: Schedule
    ranks: tuple[RankStep, ...]
    micro_steps: int
    path: SyncPath | None
    """None if there is nothing to sync."""

    def cost(self, action: Action) -> Cost:
        return self.ranks[self.schedule.rank_of(action.stage)].costs[action.kind, action.stage]

    @cached_property
    def timeline(self) -> Sequence[Sequence[TimedAction]]:
        """The actions of one micro-step, by rank along pp."""
        return timeline(self.schedule, lambda action: self.cost(action).predicted_s)

    @cached_property
    def pass_s(self) -> float:
        """One micro-step, of all ranks."""
        return max(row[-1][2] for row in self.timeline)

    @property
    def passes_s(self) -> float:
        return self.micro_steps * self.pass_s

    @property
    def _after_s(self) -> float:
        return max(one.after_s for one in self.ranks)

    @property
    def predicted_s(self) -> float:
        return self.passes_s + self._after_s

    def times_of(self, position: int) -> RankTimes:
        """Of the rank at `position` along pp."""
        row, rank = self.schedule.rows[position], self.ranks[position]
        costs = [self.cost(action) for action in row]
        messages = {axis: Traffic() for axis in self.mesh.sizes if axis != DATA_PARALLEL and self.mesh.size(axis) > 1}
        for cost in costs:
            for axis, traffic in cost.messages.items():
                messages[axis] += traffic
        return RankTimes(
            device_s=self.micro_steps * sum(cost.device_s for cost in costs),
            host_s=self.micro_steps * sum(cost.host_s for cost in costs),
            messages={axis: traffic * self.micro_steps for axis, traffic in messages.items()},
            idle_s=self.micro_steps * max(0.0, self.pass_s - sum(cost.predicted_s for cost in costs)),
            update_s=rank.update_s,
            exposed_sync_s=self._after_s - rank.update_s,
        )

    @cached_property
    def _first(self) -> RankTimes:
        return self.times_of(0)

    @property
    def idle_share(self) -> float:
        """The share of the ranks' time in passes in which they wait for one another; messages do not count."""
        idle_s = sum(self.times_of(position).idle_s for position in range(len(self.ranks)))
        return idle_s / (self.passes_s * len(self.ranks))

    @property
    def model_s(self) -> float:
        return self._first.device_s

    @property
    def host_s(self) -> float:
        return self._first.host_s

    @property
    def waited_s(self) -> Mapping[str, float]:
        """By mesh axis: in messages, and along pp also idle."""
        return {
            axis: traffic.predicted_s + (self._first.idle_s if axis == PIPELINE else 0.0)
            for axis, traffic in self._first.messages.items()
        }

    @property
    def update_s(self) -> float:
        return self._first.update_s

    @property
    def hidden_sync_s(self) -> float:
        return self.ranks[0].scaled.hidden_sync_s

    @property
    def exposed_sync_s(self) -> float:
        return self._first.exposed_sync_s

    @property
    def replicas(self) -> int:
        return self.mesh.size(DATA_PARALLEL) // self.program.chips

    @property
    def samples_per_s(self) -> float:
        return self.replicas * self.micro_steps * self.program.replica_batch_size / self.predicted_s

    def of_kind_s(self, kind: SectionKind) -> float:
        """All sections of `kind` in the step."""
        times = [one.price.predicted_s for one in self.ranks[0].alone.sections if one.kind is kind]
        runs = self.micro_steps * self.schedule.micro_batches if kind in MODEL_KINDS else 1
        return runs * sum(times)


def predict_mesh(
    program: Program,
    budget: Budget,
    calibration: Calibration,
    placement: Placement,
    path: SyncPath,
    micro_steps: int = 1,
) -> MeshStep:
    """The step of `program` on `placement`, which has a place for each rank. Raises MachineError if a rank does not
    fit, PefError for invalid arguments."""
    check_predictable(program)
    mesh = mesh_of(program.mesh, placement.replicas)
    schedule = program.schedule or make("gpipe", 1, 1)
    ranks = tuple(
        _rank_step(of_rank(program, rank), budget, calibration, placement, path, mesh, rank)
        for rank in range(mesh.size(PIPELINE))
    )
    syncs = mesh.size(DATA_PARALLEL) > 1
    return MeshStep(program, mesh, budget, placement, schedule, ranks, micro_steps, path if syncs else None)


def _rank_step(
    program: Program,
    budget: Budget,
    calibration: Calibration,
    placement: Placement,
    path: SyncPath,
    mesh: Mesh,
    position: int,
) -> RankStep:
    graph = program.training
    if graph is None:
        raise InternalError("a mesh without a training step")
    model = [section for section in graph.sections if section.kind in MODEL_KINDS]
    work = work_of(graph, program.symbols)
    check_chip(graph, work, budget)
    pieces = pieces_as_compiled(graph, work)
    alone = price_pieces(program, work, pieces, budget, calibration, program.batch_size, 1)
    rank = mesh.group(0, PIPELINE)[position]
    scaled = scale(program, alone, _part(placement, mesh.group(rank, DATA_PARALLEL)), path)
    copies = copies_of(graph, program, placement, mesh, rank)
    costs = {}
    for (kind, stage), (start, stop) in spans_of_actions(model).items():
        messages = traffic_of(model[start:stop], graph, program, placement, mesh, rank)
        device_s = sum(one.price.predicted_s for one in alone.sections[start:stop])
        sent_s = alone.sent_s if kind is ActionKind.FORWARD else 0.0
        costs[kind, stage] = Cost(device_s, (stop - start) * alone.start_s + sent_s, messages)
    return RankStep(program, alone, _complete(costs), scaled, copies)


def _complete(costs: Mapping[tuple[ActionKind, int], Cost]) -> Mapping[tuple[ActionKind, int], Cost]:
    """`costs`, with nothing for kinds of actions that no section belongs to."""
    stages = {stage for _, stage in costs}
    return {(kind, stage): Cost(0.0, 0.0, {}) for kind in ActionKind for stage in stages} | dict(costs)


def _part(placement: Placement, ranks: Sequence[int]) -> Placement:
    """The placement of some ranks."""
    if placement.node_of is None and len(ranks) == placement.replicas:
        return placement
    locations = placement.locations()
    return replace(placement, replicas=len(ranks), node_of=tuple(locations[rank].node for rank in ranks))
