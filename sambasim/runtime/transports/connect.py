"""Opens the ranks of a process: their device memories, with weights, and their transports. For runs, SambaFlow apps and
benchmarks. `Way` lists the sync paths; `runtime/run/setup.py` chooses one by the options, `runtime/measure/paths.py`
has those that `bench` times, and `records/metrics.py` the names of host syncs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import NamedTuple, final

from sambasim.errors import MachineError
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, TENSOR, Mesh, mesh_of
from sambasim.ir.program import Program
from sambasim.ir.ranks import kept, of_ranks
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.process import check_node_memory
from sambasim.runtime.transports.communication import AxisGroup, Communication, Fusions, GradientSync, Shared, Simple
from sambasim.runtime.transports.exchange import Places
from sambasim.runtime.transports.host import Host, Roles, parameter_server, roles_of
from sambasim.runtime.transports.in_process import Hub, HubGroup, InProcess
from sambasim.runtime.transports.messages import Boxes, MessageGroup, box_bytes, gather_losses
from sambasim.runtime.transports.window import SmallWindow, Window, allocate_devices, is_small
from sambasim.runtime.values.mean import Wire
from sambasim.runtime.values.memory import DeviceMemory, slices_of
from sambasim.runtime.watch.observer import StepObserver, report_spans


@final
@dataclass(eq=False)
class Transport:
    """Rank `rank` of `mesh`. Along dp it is connected by `sync`, along other axes by `connect`, given the ranks of its
    group; `end` is the end of each step. `hub` connects the ranks of this process; None if there is only one."""

    memory: DeviceMemory
    sync: GradientSync
    mesh: Mesh
    rank: int
    connect: Callable[[Sequence[int]], AxisGroup]
    end: Communication[Shared]
    title: str
    hub: Hub | None = None

    def __post_init__(self) -> None:
        self.program, self.replica = self.memory.program, self.sync.replica
        self.gives_loss, self.is_first_copy = self.mesh.gives_loss(self.rank), self.mesh.is_first_copy(self.rank)
        self.groups = {group.name: group for group in self.program.groups}
        self.title += ", wire bf16" if self.sync.wire == "bf16" else ""

    def axis_group(self, axis: str) -> AxisGroup:
        """The group along `axis` that this rank belongs to."""
        return self.sync.group if axis == DATA_PARALLEL else self.connect(self.mesh.group(self.rank, axis))

    def fusions(self) -> Fusions:
        """Those that fit the mesh: that of a clipped update takes its all-reduce for the only one, along dp."""
        is_only_dp = self.mesh.world_size == self.sync.replicas
        return {at: bind for at, bind in self.sync.fusions().items() if is_only_dp or "comm.all_reduce" not in at}

    def observe(self, observer: StepObserver | None) -> None:
        for part in self.sync.observed:
            report_spans(part, observer, self.rank)


class Way(StrEnum):
    """How replicas communicate."""

    IN_PROCESS = "in-process"  # one replica, or several in an emulation
    DEVICE = "device"
    HOST = "host"
    HOST_REPLICATED = "host-replicated"  # every rank holds all optimizer states
    GLOO = "gloo"
    PARAMETER_SERVER = "parameter-server"


class Allocated(NamedTuple):
    """For each rank of this process: its device memory; the communicator of its group along dp; the memories of that
    group on this node, by rank, if the node shares them."""

    memories: Sequence[DeviceMemory]
    groups: Sequence[Communicator]
    devices: Sequence[Mapping[int, DeviceMemory]] = ()


def open_ranks(
    program: Program,
    communicator: Communicator,
    way: Way,
    fill: Callable[[DeviceMemory, int], object],
    ranks: Sequence[int] = (0,),
    mesh: Mesh | None = None,
    roles: Roles | None = None,
    wire: Wire = "fp32",
) -> Sequence[Transport]:
    """Collective. Allocate memory for `ranks`, which this process runs, `fill` it, given the rank, and connect them.
    `mesh`: of the job, if it has other axes than dp; `wire`: see `tree_mean`. Raises MachineError if there is too
    little memory."""
    allocated = allocate(program, communicator, way, ranks, mesh)
    with communicator.alike():  # another rank may fill memory that this one reads
        for rank, memory in zip(ranks, allocated.memories, strict=True):
            fill(memory, rank)
    return connect(communicator, way, allocated, roles, mesh, wire)


def allocate(
    program: Program, communicator: Communicator, way: Way, ranks: Sequence[int] = (0,), mesh: Mesh | None = None
) -> Allocated:
    """Collective. The memories of `open_ranks`, zeros."""
    groups, programs = groups_of(communicator, ranks, mesh), [program] * len(ranks)
    if mesh is not None and mesh.size(PIPELINE) > 1:
        of_stages = of_ranks(program)
        programs = [of_stages[mesh.coordinate(rank, PIPELINE)] for rank in ranks]
    if way is Way.DEVICE:
        devices = [allocate_devices(of_rank, group) for of_rank, group in zip(programs, groups, strict=True)]
        memories = [shared[group.rank] for shared, group in zip(devices, groups, strict=True)]
        return Allocated(memories, groups, devices)
    needed = program.device_bytes * len(ranks)
    if way is Way.HOST:
        for group in groups:
            updated = {name: slices[group.rank] for name, slices in slices_of(program, group.world_size).items()}
            needed -= sum(part.size_bytes - part.kept_bytes for part in kept(program, updated))
    check_node_memory(communicator, needed)
    return Allocated([DeviceMemory.private(of_rank) for of_rank in programs], groups)


def groups_of(communicator: Communicator, ranks: Sequence[int], mesh: Mesh | None) -> Sequence[Communicator]:
    """Collective. The communicator along dp of each of `ranks`, so that messages of a process's ranks do not mix."""
    if mesh is None or communicator.world_size == 1:
        return [communicator] * len(ranks)
    return [communicator.subset([peer // len(ranks) for peer in mesh.group(rank, DATA_PARALLEL)]) for rank in ranks]


def connect(
    communicator: Communicator,
    way: Way,
    allocated: Allocated,
    roles: Roles | None = None,
    mesh: Mesh | None = None,
    wire: Wire = "fp32",
) -> Sequence[Transport]:
    """Collective. A transport for each rank of this process, whose weights are in device memory already: for all ranks
    of the job, a whole replica, one rank of a mesh, or all ranks of a replica (`--one-process-per-replica`)."""
    memories = allocated.memories
    if way is Way.IN_PROCESS and communicator.world_size == 1:
        return connect_here(memories, mesh, wire)
    syncs = [_sync(way, allocated, number, roles, wire) for number in range(len(memories))]
    if mesh is None:
        (memory,), (sync,) = memories, syncs
        mesh, by_messages = mesh_of(memory.program.mesh, sync.replicas), partial(MessageGroup, communicator)
        return [
            Transport(memory, sync, mesh, sync.replica, by_messages, Simple(lambda: sync.end_of_step()), sync.title)
        ]
    if len(syncs) == 1:
        return [_by_messages(memories[0], syncs[0], mesh, communicator)]
    # All ranks of one replica take turns in this process. They yield only to each other, and every process resumes its
    # ranks in the same order: so all processes meet along dp in the same order, and cannot deadlock.
    hub, transports = Hub(len(syncs)), []
    for rank, (memory, sync) in enumerate(zip(memories, syncs, strict=True), communicator.rank * len(syncs)):
        title = _title(f"mesh {mesh}, one process for each replica", sync)
        transports.append(_in_hub(memory, sync, mesh, rank, hub, mesh.ranks_of(sync.replica), title))
    return transports


def connect_here(
    memories: Sequence[DeviceMemory], mesh: Mesh | None = None, wire: Wire = "fp32"
) -> Sequence[Transport]:
    """A transport for each rank of `mesh`, which all run in this process; by default the mesh of one replica."""
    count = len(memories)
    hub, mesh = Hub(count), mesh or mesh_of(memories[0].program.mesh, count)
    transports = []
    for rank, memory in enumerate(memories):
        peers = mesh.group(rank, DATA_PARALLEL)
        sync = InProcess([memories[peer] for peer in peers], HubGroup(hub, peers, rank), wire)
        is_mesh = count > 1 and (count > len(peers) or memory.program.chips > 1)
        title = f"emulated ({mesh} in one process)" if is_mesh else sync.title
        transports.append(_in_hub(memory, sync, mesh, rank, hub, range(count), title))
    return transports


def _in_hub(
    memory: DeviceMemory, sync: GradientSync, mesh: Mesh, rank: int, hub: Hub, ranks: Sequence[int], title: str
) -> Transport:
    """One of `ranks`, which all run in this process, connected by `hub`. A step ends along dp, and then for `ranks`;
    the rank that gives the loss has received those of all replicas along dp."""
    end: Communication[Shared] = Simple(lambda: sync.end_of_step())  # the method as it is then: it may report a span

    def own(_: object) -> Shared:
        shared = sync.end_of_step()
        return shared if mesh.gives_loss(rank) else shared._replace(losses=())

    def of_all(shared: Sequence[Shared]) -> Shared:
        losses = [loss for of_rank in shared for loss in of_rank.losses]
        return Shared(losses, max(of_rank.request for of_rank in shared))

    if len(ranks) > 1:
        end = HubGroup(hub, ranks, rank).together("end of step", own, of_all)
    return Transport(memory, sync, mesh, rank, lambda peers: HubGroup(hub, peers, rank), end, title, hub)


def _by_messages(memory: DeviceMemory, sync: GradientSync, mesh: Mesh, communicator: Communicator) -> Transport:
    """The only rank of its process. Along tp it uses shared memory, if the ranks are on one node."""
    rank, all_ranks, node_of = communicator.rank, range(mesh.world_size), communicator.node_of
    give_loss = [other for other in all_ranks if mesh.gives_loss(other)]
    gather = gather_losses(communicator, give_loss, memory.program.exchanged)
    along_tp = MessageGroup(communicator, mesh.group(rank, TENSOR))
    size_bytes, title = max(communicator.all_gather_object(box_bytes(memory.program, TENSOR))), f"mesh {mesh}"
    if size_bytes and all(node_of[other] == node_of[mesh.group(other, TENSOR)[0]] for other in all_ranks):
        try:
            along_tp.boxes = Boxes(communicator.subset(along_tp.ranks), size_bytes)
            sync.observed.append(along_tp.boxes.flags)
        except MachineError:
            title += ", messages along tp, because there is too little shared memory"

    def connection(ranks: Sequence[int]) -> AxisGroup:
        return along_tp if tuple(ranks) == along_tp.ranks else MessageGroup(communicator, ranks)

    def end_step() -> Shared:
        """Along dp first, which makes all updates visible. What that returns is of this group only; so losses are
        gathered again, from the ranks of the mesh that have one."""
        sync.end_of_step()
        losses, request = sync.offered
        return gather(losses if mesh.gives_loss(rank) else (), request)()

    return Transport(memory, sync, mesh, rank, connection, Simple(end_step), _title(title, sync))


def _title(title: str, sync: GradientSync) -> str:
    return title + (f", along dp: {sync.title}" if sync.replicas > 1 else "")


def _sync(way: Way, allocated: Allocated, number: int, roles: Roles | None, wire: Wire) -> GradientSync:
    memory, group = allocated.memories[number], allocated.groups[number]
    match way:
        case Way.IN_PROCESS:
            return InProcess([memory], HubGroup(Hub(1), [0], 0))
        case Way.DEVICE:
            return (SmallWindow if is_small(memory.program, group) else Window)(allocated.devices[number], group, wire)
        case Way.HOST | Way.HOST_REPLICATED | Way.GLOO:
            slices = slices_of(memory.program, group.world_size)
            places = Places(group, range(group.world_size), slices, memory, memory, wire)
            return Host(places, replicated=way is Way.HOST_REPLICATED, through_gloo=way is Way.GLOO)
        case Way.PARAMETER_SERVER:
            return parameter_server(memory, roles or roles_of(group.world_size, dedicated=0), group, wire)
