"""The predicted step of a replica of several ranks, each on a device of its own: the stages of a pipeline, by its
schedule, and parts of tensors on several chips.

A message takes the latency of a link and its bytes over the bandwidth; in a collective, each rank receives the tensors
of all others, as in the runtime. Nothing of that overlaps with operators, and the time of a section includes the host's
to start it. Nobody has published such steps of RDUs: the times of messages follow from published bandwidths alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sambasim.costs.fit import check_chip
from sambasim.costs.work import device_bytes_of, work_of
from sambasim.errors import InternalError
from sambasim.hardware.budget import Budget, Calibration
from sambasim.hardware.placement import Placement
from sambasim.ir.dataflow import axis_of, groups_of, spans_of_actions
from sambasim.ir.graph import Graph, Node, Section, SectionKind, node_references
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, Mesh, copy_mesh, mesh_of
from sambasim.ir.program import Program
from sambasim.ir.schedule import Action, ActionKind, Schedule, make, timeline
from sambasim.ir.stages import copied, of_rank
from sambasim.simulation.scaling import scale
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
    messages_s: Mapping[str, float]

    @property
    def predicted_s(self) -> float:
        return self.device_s + self.host_s + sum(self.messages_s.values())


@dataclass(frozen=True, slots=True)
class RankStep:
    """One rank along pp: what it runs for one micro-batch, the cost of each of its actions by kind and stage, and what
    follows the last micro-batch."""

    alone: PredictedStep
    costs: Mapping[tuple[ActionKind, int], Cost]
    update_s: float
    sync_s: float
    exposed_sync_s: float


@dataclass(frozen=True)
class MeshStep:
    """A step of all replicas. Unless it says otherwise, a time is that of rank 0, as in a measured step."""

    program: Program
    mesh: Mesh
    budget: Budget
    placement: Placement
    schedule: Schedule
    ranks: tuple[RankStep, ...]
    micro_steps: int
    path: SyncPath | None
    """None if there is nothing to sync."""

    def _cost(self, action: Action) -> Cost:
        return self.ranks[self.schedule.rank_of(action.stage)].costs[action.kind, action.stage]

    @cached_property
    def _ends_s(self) -> tuple[float, ...]:
        """When each rank has run its row, in one micro-step."""
        rows = timeline(self.schedule, lambda action: self._cost(action).predicted_s)
        return tuple(row[-1][2] for row in rows)

    @property
    def pass_s(self) -> float:
        """One micro-step, of all ranks."""
        return max(self._ends_s)

    @cached_property
    def idle_share(self) -> float:
        """The share of the ranks' time in passes in which they wait for one another; messages do not count."""
        busy_s = sum(self._cost(action).predicted_s for row in self.schedule.rows for action in row)
        return 1 - busy_s / (self.pass_s * self.schedule.ranks)

    def _of_first(self) -> list[Cost]:
        return [self._cost(action) for action in self.schedule.rows[0]]

    @property
    def model_s(self) -> float:
        return self.micro_steps * sum(cost.device_s for cost in self._of_first())

    @property
    def host_s(self) -> float:
        return self.micro_steps * sum(cost.host_s for cost in self._of_first())

    @property
    def waited_s(self) -> Mapping[str, float]:
        """By mesh axis: in messages, and along pp also idle."""
        found = {axis: 0.0 for axis in self.mesh.sizes if axis != DATA_PARALLEL and self.mesh.size(axis) > 1}
        for cost in self._of_first():
            for axis, seconds in cost.messages_s.items():
                found[axis] += self.micro_steps * seconds
        if PIPELINE in found:
            found[PIPELINE] += self.micro_steps * (self.pass_s - sum(cost.predicted_s for cost in self._of_first()))
        return found

    @property
    def update_s(self) -> float:
        return self.ranks[0].update_s

    @property
    def hidden_sync_s(self) -> float:
        return self.ranks[0].sync_s - self.ranks[0].exposed_sync_s

    @property
    def exposed_sync_s(self) -> float:
        """With waiting for the rank that ends last."""
        return max(one.update_s + one.exposed_sync_s for one in self.ranks) - self.update_s

    @property
    def predicted_s(self) -> float:
        return self.micro_steps * self.pass_s + self.update_s + self.exposed_sync_s

    @property
    def samples_per_s(self) -> float:
        replicas, micro_batches = self.mesh.size(DATA_PARALLEL), self.schedule.micro_batches
        return replicas * self.micro_steps * micro_batches * self.program.batch_size / self.predicted_s

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
    node_of = [location.node for location in placement.locations()]
    group = mesh.group(mesh.group(0, PIPELINE)[position], DATA_PARALLEL)
    scaled = scale(program, alone, _part(placement, group, node_of), path)
    update_s = sum(one.price.predicted_s for one in scaled.step.sections if one.kind not in MODEL_KINDS)
    own = {group.name for group in program.groups}
    for node in graph.nodes:
        if (symbol := copied(node)) and own.issuperset(groups_of(node)):  # the gradient comes, the parameter goes back
            copied_bytes = device_bytes_of(program.symbols[symbol].type)
            update_s += _message_s(copied_bytes, PIPELINE, placement, mesh, node_of)
    costs = {}
    for (kind, stage), (start, stop) in spans_of_actions(model).items():
        messages_s: dict[str, float] = {}
        for section in model[start:stop]:
            for axis, seconds in _messages(section, graph, program, placement, mesh, node_of):
                messages_s[axis] = messages_s.get(axis, 0.0) + seconds
        device_s = sum(one.price.predicted_s for one in alone.sections[start:stop])
        sent_s = alone.sent_s if kind is ActionKind.FORWARD else 0.0
        costs[kind, stage] = Cost(device_s, (stop - start) * alone.start_s + sent_s, messages_s)
    return RankStep(alone, _complete(costs), update_s, scaled.sync_s, scaled.exposed_sync_s)


def _complete(costs: Mapping[tuple[ActionKind, int], Cost]) -> Mapping[tuple[ActionKind, int], Cost]:
    """`costs`, with nothing for kinds of actions that no section belongs to."""
    stages = {stage for _, stage in costs}
    return {(kind, stage): Cost(0.0, 0.0, {}) for kind in ActionKind for stage in stages} | dict(costs)


def _part(placement: Placement, ranks: Sequence[int], node_of: Sequence[int]) -> Placement:
    """The placement of some ranks."""
    if placement.node_of is None and len(ranks) == placement.replicas:
        return placement
    return replace(placement, replicas=len(ranks), node_of=tuple(node_of[rank] for rank in ranks))


def _messages(
    section: Section, graph: Graph, program: Program, placement: Placement, mesh: Mesh, node_of: Sequence[int]
) -> list[tuple[str, float]]:
    found = []
    for node in graph.section_nodes(section):
        axis = axis_of(node)
        if axis is None or groups_of(node) or node.operator in ("comm.send", "comm.shard", "comm.index"):
            continue
        size_bytes = _received_bytes(node, graph, program, mesh.size(axis))
        found.append((axis, _message_s(size_bytes, axis, placement, mesh, node_of)))
    return found


def _message_s(size_bytes: int, axis: str, placement: Placement, mesh: Mesh, node_of: Sequence[int]) -> float:
    cluster = placement.cluster
    if len({node_of[rank] for rank in mesh.group(0, axis)}) == 1:
        link, links = cluster.peer_link, cluster.peer_links_per_rdu / placement.on_an_rdu
    else:
        link, links = cluster.network_link, float(cluster.network_links_per_node)
    return link.latency_s + size_bytes / (link.bandwidth_bytes_per_s * links)


def _received_bytes(node: Node, graph: Graph, program: Program, size: int) -> int:
    if node.operator == "comm.recv":
        return device_bytes_of(graph.values[node.results[0] or ""])
    (operand,) = node_references(node)
    type_ = graph.values[operand] if operand in graph.values else program.symbols[operand].type
    return (size - 1) * device_bytes_of(type_)
