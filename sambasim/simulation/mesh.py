"""The predicted step of replicas with the sections of their PEF. A replica has one rank or several, each on a device
of its own: the stages of a pipeline, by its schedule, and parts of tensors on several chips.

Messages do not overlap with operators. Nobody has published such steps of RDUs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from sambasim.hardware.budget import Budget, Calibration
from sambasim.hardware.placement import Placement
from sambasim.ir.graph import Section, SectionKind
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, Mesh, copy_mesh, mesh_of
from sambasim.ir.program import Program
from sambasim.ir.schedule import Action, ActionKind, Schedule, Span, make, timeline
from sambasim.simulation.ranks import Cost, PricedRank, RankStep, part_of, price_ranks, rank_step
from sambasim.simulation.step import MODEL_KINDS
from sambasim.simulation.sync import SyncPath, Traffic


def has_several_ranks(program: Program) -> bool:
    """Whether one copy of the model has several ranks; chips that share a batch have whole copies."""
    return copy_mesh(program.mesh).world_size > 1


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The parts of a rank's step, which add up to it. In passes: on the device, on the host, in messages within the
    replica, in parameters that ZeRO gathers, and waiting for other stages (`idle_s`). Then the update,
    and sync that does not overlap with passes, with waiting for the rank that ends last."""

    device_s: float
    host_s: float
    messages: Mapping[str, Traffic]
    gathered: Traffic
    idle_s: float
    update_s: float
    sync_after_s: float

    @property
    def busy_s(self) -> float:
        """In passes, on the device and on the host."""
        return self.device_s + self.host_s

    @property
    def messages_s(self) -> float:
        """In passes, of all axes."""
        return self.gathered.predicted_s + sum(one.predicted_s for one in self.messages.values())

    @property
    def exposed_sync_s(self) -> float:
        return self.gathered.predicted_s + self.sync_after_s


@dataclass(frozen=True)
class MeshStep:
    """A step of all replicas. Ranks that differ along other axes than pp have the same times. Unless it says otherwise,
    a time is that of rank 0, as in a measured step."""

    program: Program
    mesh: Mesh
    placement: Placement
    schedule: Schedule
    ranks: tuple[RankStep, ...]
    micro_steps: int
    path: SyncPath | None
    """None if there is nothing to sync."""

    @property
    def budget(self) -> Budget:
        return self.ranks[0].alone.budget

    def cost(self, action: Action) -> Cost:
        return self.ranks[self.schedule.rank_of(action.stage)].costs[action.kind, action.stage]

    @cached_property
    def timeline(self) -> Sequence[Sequence[Span]]:
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
        messages = {axis: Traffic() for axis, size in self.mesh.sizes.items() if axis == DATA_PARALLEL or size > 1}
        for cost in costs:
            for axis, traffic in cost.messages.items():
                messages[axis] += traffic
        gathered = messages.pop(DATA_PARALLEL, Traffic())
        return RankTimes(
            device_s=self.micro_steps * sum(cost.device_s for cost in costs),
            host_s=self.micro_steps * sum(cost.host_s for cost in costs),
            messages={axis: traffic * self.micro_steps for axis, traffic in messages.items()},
            gathered=gathered * self.micro_steps,
            idle_s=self.micro_steps * max(0.0, self.pass_s - sum(cost.predicted_s for cost in costs)),
            update_s=rank.update_s,
            sync_after_s=max(self._after_s - rank.update_s, 0.0),
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
        samples = self.ranks[0].alone.batch_size * self.program.micro_batches * self.program.chips
        return self.replicas * self.micro_steps * samples / self.predicted_s

    @cached_property
    def of_one_replica(self) -> "MeshStep":
        """The step of the first replica alone. Its chips that share a batch sync as here."""
        if self.path is None:
            return self
        priced = [PricedRank(one.program, one.alone, one.resident) for one in self.ranks]
        placement = part_of(self.placement, range(self.program.ranks_of_replica))
        return mesh_step(self.program, priced, placement, self.path, self.micro_steps)

    @property
    def efficiency(self) -> float:
        """The samples/s of a replica, relative to those of one alone; at most 1, although replicas share the update."""
        return min(1.0, self.samples_per_s / self.replicas / self.of_one_replica.samples_per_s)

    @property
    def forward_s(self) -> float:
        """One forward of rank 0, host time included."""
        return sum(cost.predicted_s for (kind, _), cost in self.ranks[0].costs.items() if kind is ActionKind.FORWARD)

    @property
    def graph_s(self) -> float:
        """All sections of rank 0 one after the other, without host time and without overlap of the sync."""
        return self.model_s + self.update_s + self.ranks[0].scaled.sync_s

    def by_section_s(self, sections: Sequence[Section]) -> Mapping[int, float]:
        """Seconds of one execution of each of `sections` of rank 0, by section index. Those without a prediction are
        left out."""
        found: dict[int, float] = {}
        for kind in SectionKind:
            indices = [section.index for section in sections if section.kind is kind]
            times_s = self.ranks[0].scaled.times_s(kind)
            if len(indices) == 1 and times_s:
                found[indices[0]] = sum(times_s)
            elif len(indices) == len(times_s):
                found |= dict(zip(indices, times_s, strict=True))
        return found

    def of_kind_s(self, kind: SectionKind) -> float:
        """All sections of `kind` in the step; of REDUCE and GATHER also what overlaps."""
        runs = self.micro_steps * self.schedule.micro_batches if kind in MODEL_KINDS else 1
        in_passes_s = self._first.gathered.predicted_s if kind is SectionKind.GATHER else 0.0
        return runs * sum(self.ranks[0].scaled.times_s(kind)) + in_passes_s


def mesh_step(
    program: Program, priced: Sequence[PricedRank], placement: Placement, path: SyncPath, micro_steps: int = 1
) -> MeshStep:
    """The step of `program` on `placement`, which has a place for each rank."""
    mesh = mesh_of(program.mesh, placement.replicas)
    schedule = program.schedule or make("gpipe", 1, 1)
    first = mesh.group(0, PIPELINE)
    ranks = tuple(rank_step(one, placement, path, mesh, rank) for one, rank in zip(priced, first, strict=True))
    syncs = mesh.size(DATA_PARALLEL) > 1
    return MeshStep(program, mesh, placement, schedule, ranks, micro_steps, path if syncs else None)


def predict_mesh(
    program: Program,
    budget: Budget,
    calibration: Calibration,
    placement: Placement,
    path: SyncPath,
    micro_steps: int = 1,
) -> MeshStep:
    """As `price_ranks` and `mesh_step`."""
    return mesh_step(program, price_ranks(program, budget, calibration), placement, path, micro_steps)
