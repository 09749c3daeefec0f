"""The predicted step of all ranks of a job, each on its own device: stages of a pipeline, by its schedule, and parts of
tensors on several chips. Messages in a replica do not overlap with operators. No such step of RDUs was published."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from sambasim.costs.fit import Memory
from sambasim.hardware.placement import Placement
from sambasim.ir.dataflow import pass_and_update, spans_of_actions
from sambasim.ir.graph import Section, SectionKind
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, Mesh, mesh_of
from sambasim.ir.program import Program
from sambasim.ir.schedule import Action, ActionKind, Schedule, make, timeline
from sambasim.ir.schedule import Span as ActionSpan
from sambasim.ir.types import SymbolKind
from sambasim.simulation.alone import MODEL_KINDS, RankAlone
from sambasim.simulation.memory import memory_of
from sambasim.simulation.scaling import Span, SyncedRank, Track, on_links, with_sync
from sambasim.simulation.sync import SyncPath, Traffic, copies_of, gathered_in_passes, traffic_of


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
class RankStep:
    """One rank along pp: costs of actions by kind and stage, its update and sync, copies of tied parameters."""

    alone: RankAlone
    costs: Mapping[tuple[ActionKind, int], Cost]
    synced: SyncedRank
    copies: Mapping[str, Traffic]

    @property
    def update_s(self) -> float:
        """With copies."""
        copies_s = sum(traffic.predicted_s for traffic in self.copies.values())
        return sum(section.price.predicted_s for section in self.synced.step.update) + copies_s

    def spans_after(self, end_s: float) -> list[Span]:
        """What follows the last pass of a step, which ends at `end_s`: sync and update, and the copies of tied
        parameters, of whose gradients before the update, of new values at the end."""
        # `synced` has sync and update after passes of this rank that never wait: they move with the end of passes.
        passes_end_s = max(span.stop_s for span in self.synced.spans if span.kind in MODEL_KINDS)
        spans = self._copied(SectionKind.REDUCE, SymbolKind.GRADIENT, end_s)
        copied_s = max((span.stop_s for span in spans), default=end_s)
        for span in self.synced.spans:
            if span.kind not in MODEL_KINDS and span.track is not Track.HOST:
                overlaps = span.start_s < passes_end_s  # a group that is reduced during the last pass
                later_s = (end_s if overlaps else copied_s) - passes_end_s
                spans.append(replace(span, start_s=span.start_s + later_s, stop_s=span.stop_s + later_s))
        ended_s = max(span.stop_s for span in spans)
        return spans + self._copied(SectionKind.GATHER, SymbolKind.PARAMETER, ended_s)

    def _copied(self, kind: SectionKind, of: SymbolKind, start_s: float) -> list[Span]:
        symbols = self.alone.program.symbols
        copies = {f"copy of {name}": traffic for name, traffic in self.copies.items() if symbols[name].kind is of}
        return on_links(kind, copies, dict.fromkeys(copies, start_s))


def part_of(placement: Placement, ranks: Sequence[int]) -> Placement:
    return replace(placement, node_of=tuple(placement.node_of[rank] for rank in ranks))


def _rank_step(alone: RankAlone, placement: Placement, path: SyncPath, mesh: Mesh, rank: int) -> RankStep:
    """The step of `rank`, which is the first of those that are alike along other axes than pp."""
    program = alone.program
    in_pass, _ = pass_and_update(program.leading)
    replicas = part_of(placement, mesh.group(rank, DATA_PARALLEL))
    synced = with_sync(alone, replicas, path)
    by_host = synced.path is SyncPath.HOST and program.ranks_of_replica > 1
    gathered = gathered_in_passes(alone, replicas) if by_host else []
    costs = {}
    spans = spans_of_actions(in_pass) or {(ActionKind.FORWARD, 0): (0, 1)}  # which starts nothing
    forwards = sum(kind is ActionKind.FORWARD for kind, _ in spans)  # inputs and outputs are sent once for all of them
    for (kind, stage), (start, stop) in spans.items():
        messages = dict(traffic_of(in_pass[start:stop], alone, placement, mesh, rank))
        if parameters := gathered[start:stop]:
            messages[DATA_PARALLEL] = sum(parameters, Traffic())
        device_s = sum(section.price.predicted_s for section in alone.model[start:stop])
        sent_s = alone.sent_s / forwards if kind is ActionKind.FORWARD else 0.0
        costs[kind, stage] = Cost(device_s, (stop - start) * alone.budget.start_s + sent_s, messages)
    return RankStep(alone, costs, synced, copies_of(program, placement, mesh, rank))


@dataclass(frozen=True)
class Passes:
    """The passes of one micro-step: the actions of a schedule, each of which takes as long as its `cost`."""

    schedule: Schedule
    cost: Callable[[Action], Cost]

    @cached_property
    def timeline(self) -> Sequence[Sequence[ActionSpan]]:
        """By rank along pp."""
        return timeline(self.schedule, lambda action: self.cost(action).predicted_s)

    @cached_property
    def predicted_s(self) -> float:
        """Of all ranks."""
        return max(row[-1][2] for row in self.timeline)

    @cached_property
    def of_ranks(self) -> Sequence[Cost]:
        """All actions of each rank along pp."""
        return [sum(map(self.cost, row), Cost()) for row in self.schedule.rows]

    def idle_s(self, position: int) -> float:
        """Of the rank at `position` along pp: it waits for other stages."""
        row = self.schedule.rows[position]
        return max(0.0, self.predicted_s - sum(self.cost(action).predicted_s for action in row))


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The parts of a rank's step, which add up to it: in passes, with parameters that ZeRO gathers and waiting for
    other stages (`idle_s`); then the update and sync that does not overlap, with waiting for the last rank."""

    device_s: float
    host_s: float
    messages: Mapping[str, Traffic]
    gathered: Traffic
    idle_s: float
    update_s: float
    sync_after_s: float

    @property
    def busy_s(self) -> float:
        return self.device_s + self.host_s

    @property
    def messages_s(self) -> float:
        return self.gathered.predicted_s + sum(traffic.predicted_s for traffic in self.messages.values())

    @property
    def exposed_sync_s(self) -> float:
        return self.gathered.predicted_s + self.sync_after_s


@dataclass(frozen=True)
class PredictedStep:
    """A step of all replicas. A time is that of rank 0 (`first`), as in a measured step, unless it says otherwise."""

    program: Program
    mesh: Mesh
    placement: Placement
    passes: Passes
    ranks: tuple[RankStep, ...]

    @property
    def path(self) -> SyncPath | None:
        """None if there is nothing to sync."""
        return self.synced.path

    @property
    def several_ranks(self) -> bool:
        """Whether a replica has several ranks, of stages, parts of tensors, or chips that share its batch."""
        return self.program.ranks_of_replica > 1

    @property
    def schedule(self) -> Schedule:
        return self.passes.schedule

    @property
    def alone(self) -> RankAlone:
        return self.ranks[0].alone

    @property
    def synced(self) -> SyncedRank:
        return self.ranks[0].synced

    @property
    def micro_steps(self) -> int:
        return self.alone.micro_steps

    @property
    def passes_s(self) -> float:
        return self.micro_steps * self.passes.predicted_s

    @property
    def _after_s(self) -> float:
        """Update, and sync that does not overlap with the passes."""
        return max(rank.update_s + rank.synced.exposed_sync_s for rank in self.ranks)

    @cached_property
    def predicted_s(self) -> float:
        return self.passes_s + self._after_s

    def times_of(self, position: int) -> RankTimes:
        """Of the rank at `position` along pp."""
        rank, busy = self.ranks[position], self.passes.of_ranks[position] * self.micro_steps
        axes = [axis for axis, size in self.mesh.sizes.items() if size > 1 and axis != DATA_PARALLEL]
        messages = {axis: busy.messages.get(axis, Traffic()) for axis in axes}
        gathered, idle_s = busy.messages.get(DATA_PARALLEL, Traffic()), self.micro_steps * self.passes.idle_s(position)
        after = rank.update_s, max(self._after_s - rank.update_s, 0.0)
        return RankTimes(busy.device_s, busy.host_s, messages, gathered, idle_s, *after)

    @cached_property
    def first(self) -> RankTimes:
        return self.times_of(0)

    @property
    def idle_share(self) -> float:
        """The share of the ranks' time in passes in which they wait for one another; messages do not count."""
        idle_s = sum(self.times_of(position).idle_s for position in range(len(self.ranks)))
        return idle_s / (self.passes_s * len(self.ranks))

    @property
    def waited_s(self) -> Mapping[str, float]:
        """By mesh axis: in messages, and along pp also idle."""
        first = self.first
        idle_s = {PIPELINE: first.idle_s}
        return {axis: traffic.predicted_s + idle_s.get(axis, 0.0) for axis, traffic in first.messages.items()}

    @property
    def replicas(self) -> int:
        return self.mesh.size(DATA_PARALLEL) // self.program.chips

    @cached_property
    def memory(self) -> tuple[Memory, ...]:
        """Of each rank along pp; `activations` are tensors between sections. RDUs that sync update slices."""
        by_rdu, copies = self.path is SyncPath.RDU, self.mesh.size(DATA_PARALLEL)
        passes, found = self.micro_steps * self.program.micro_batches, list[Memory]()
        for alone in (rank.alone for rank in self.ranks):
            program = replace(alone.program, zero=max(alone.program.zero, int(by_rdu)))
            kept = memory_of(program, samples=alone.batch_size, replicas=copies, passes=passes)
            found.append(replace(kept, activations=alone.need.between_bytes))
        return tuple(found)

    @property
    def batch_size(self) -> int:
        """Of a replica in a micro-step."""
        return self.alone.batch_size * self.program.micro_batches * self.program.chips

    @property
    def samples(self) -> int:
        return self.replicas * self.micro_steps * self.batch_size

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.predicted_s

    @property
    def efficiency(self) -> float:
        """Of replicas of one rank, relative to those that share the update and never wait. Of others, the samples/s of
        a replica relative to one alone; at most 1, although replicas share the update."""
        if self.several_ranks:
            return min(1.0, self.samples_per_s / self.ideal_samples_per_s)
        return self.synced.ideal_s / self.synced.predicted_s

    @cached_property
    def ideal_samples_per_s(self) -> float:
        """At an efficiency of 1. The chips of one replica alone that share a batch sync as here."""
        if not self.several_ranks:
            return self.samples_per_s / self.efficiency
        alone = self
        if self.path is not None:
            placement = part_of(self.placement, range(self.program.ranks_of_replica))
            alone = step_of(self.program, [rank.alone for rank in self.ranks], placement, self.path)
        return self.replicas * alone.samples_per_s

    @property
    def forward_s(self) -> float:
        """One forward of rank 0, host time included."""
        return sum(cost.predicted_s for (kind, _), cost in self.ranks[0].costs.items() if kind is ActionKind.FORWARD)

    @property
    def graph_s(self) -> float:
        """All sections of rank 0 one after the other, without host time and without overlap of the sync."""
        return self.first.device_s + self.first.update_s + self.synced.sync_s

    def by_section_s(self, sections: Sequence[Section]) -> Mapping[int, float]:
        """Seconds of one execution of each of `sections` of rank 0, by index, as far as they are predicted."""
        found: dict[int, float] = {}
        for kind in SectionKind:
            indices = [section.index for section in sections if section.kind is kind]
            times_s = self.synced.times_s(kind)
            if len(indices) in (1, len(times_s)) and times_s:
                found |= dict(zip(indices, [sum(times_s)] if len(indices) == 1 else times_s, strict=True))
        return found

    def of_kind_s(self, kind: SectionKind) -> float:
        """All sections of `kind` in the step; of REDUCE and GATHER also what overlaps."""
        runs = self.micro_steps * self.schedule.micro_batches if kind in MODEL_KINDS else 1
        in_passes_s = self.first.gathered.predicted_s if kind is SectionKind.GATHER else 0.0
        return runs * sum(self.synced.times_s(kind)) + in_passes_s


def step_of(program: Program, priced: Sequence[RankAlone], placement: Placement, path: SyncPath) -> PredictedStep:
    """The step of `program`, whose ranks are `priced`, on `placement`, which has a place for each rank."""
    schedule = program.schedule or make("gpipe", 1, 1)
    # A program without the axis dp may be predicted on several devices, as if it had it.
    is_replica, count = program.ranks_of_replica == 1, placement.replicas
    mesh = Mesh({DATA_PARALLEL: count}) if is_replica else mesh_of(program.mesh, count)
    firsts = mesh.group(0, PIPELINE)
    ranks = tuple(_rank_step(own, placement, path, mesh, rank) for own, rank in zip(priced, firsts, strict=True))

    def cost(action: Action) -> Cost:
        return ranks[schedule.rank_of(action.stage)].costs.get((action.kind, action.stage), Cost())

    return PredictedStep(program, mesh, placement, Passes(schedule, cost), ranks)
