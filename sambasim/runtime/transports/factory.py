"""Creates the memories and transports of replicas, for each sync path: for runs, SambaFlow apps and benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sambasim.errors import InternalError
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, Mesh, mesh_of
from sambasim.ir.program import Program
from sambasim.ir.ranks import kept, of_ranks
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.resources import check_node_memory
from sambasim.runtime.transports.base import Transport, slices_of
from sambasim.runtime.transports.host import Roles, among_equals, by_gloo, parameter_server
from sambasim.runtime.transports.in_process import Hub, InProcess
from sambasim.runtime.transports.on_mesh import ByMessages, InOneProcess
from sambasim.runtime.transports.small_window import SmallWindow
from sambasim.runtime.transports.window import Devices, Window, allocate_devices
from sambasim.runtime.values.device import DeviceMemory, private_storage


class Way(StrEnum):
    """How replicas communicate."""

    IN_PROCESS = "in-process"  # one replica, or several in an emulation
    DEVICE = "device"
    HOST = "host"
    HOST_REPLICATED = "host-replicated"  # every rank holds all optimizer states
    GLOO = "gloo"
    PARAMETER_SERVER = "parameter-server"


@dataclass(frozen=True, slots=True)
class Allocated:
    """For each rank of this process: its device memory; the communicator of its group along dp; the memories of that
    group on this node, if the node shares them."""

    memories: Sequence[DeviceMemory]
    groups: Sequence[Communicator]
    devices: Sequence[Devices] = ()


def allocate(
    program: Program, communicator: Communicator, way: Way, ranks: Sequence[int] = (0,), mesh: Mesh | None = None
) -> Allocated:
    """Collective. Allocate memory for `ranks`, which this process runs. `mesh`: that of the job, if it has other axes
    than dp. Raises MachineError if there is too little."""
    programs, groups = programs_of(program, mesh, ranks), groups_of(communicator, ranks, mesh)
    if way is Way.DEVICE:
        devices = [allocate_devices(one, group) for one, group in zip(programs, groups, strict=True)]
        return Allocated([one.by_rank[group.rank] for one, group in zip(devices, groups, strict=True)], groups, devices)
    needed = program.device_bytes * len(ranks)
    if way is Way.HOST:
        for group in groups:
            owned = {name: of_ranks[group.rank] for name, of_ranks in slices_of(program, group.world_size).items()}
            needed -= sum(one.size_bytes - one.kept_bytes for one in kept(program, owned))
    check_node_memory(communicator, needed)
    return Allocated([DeviceMemory(one, private_storage(one.device_bytes)) for one in programs], groups)


def groups_of(communicator: Communicator, ranks: Sequence[int], mesh: Mesh | None) -> Sequence[Communicator]:
    """Collective. The communicator along dp of each of `ranks`: one for each, so that the messages of several ranks of
    a process do not mix."""
    if mesh is None or communicator.world_size == 1:
        return [communicator] * len(ranks)
    of_ranks = [mesh.group(rank, DATA_PARALLEL) for rank in ranks]
    return [communicator.subset([one // len(ranks) for one in group]) for group in of_ranks]


def programs_of(program: Program, mesh: Mesh | None, ranks: Sequence[int]) -> Sequence[Program]:
    """The program of each of `ranks`: its part of a pipeline, or all of `program`."""
    if mesh is None or mesh.size(PIPELINE) == 1:
        return [program] * len(ranks)
    of_stages = of_ranks(program)
    return [of_stages[mesh.coordinate(rank, PIPELINE)] for rank in ranks]


def connect(
    communicator: Communicator,
    way: Way,
    allocated: Allocated,
    roles: Roles | None = None,
    mesh: Mesh | None = None,
) -> Sequence[Transport]:
    """Collective. A transport for each rank of this process, whose weights must be in device memory."""
    memories = allocated.memories
    if way is Way.IN_PROCESS and communicator.world_size == 1:
        return connect_here(memories, mesh)
    along_dp = [_along_dp(way, allocated, number, roles) for number in range(len(memories))]
    if mesh is None:
        return along_dp
    if len(along_dp) == 1:
        return [ByMessages(along_dp[0], mesh, communicator)]
    hub, first = Hub(len(along_dp)), communicator.rank * len(along_dp)
    return [InOneProcess(one, mesh, rank, hub) for rank, one in enumerate(along_dp, first)]


def connect_here(memories: Sequence[DeviceMemory], mesh: Mesh | None = None) -> Sequence[Transport]:
    """A transport for each rank of `mesh`, which all run in this process; by default the mesh of one replica."""
    hub, mesh = Hub(len(memories)), mesh or mesh_of(memories[0].program.mesh, len(memories))
    return [InProcess(memory.program, memories, hub, rank, mesh) for rank, memory in enumerate(memories)]


def _along_dp(way: Way, allocated: Allocated, number: int, roles: Roles | None) -> Transport:
    """The transport along dp of rank `number` of this process."""
    memory, group = allocated.memories[number], allocated.groups[number]
    program = memory.program
    match way:
        case Way.IN_PROCESS:
            return InProcess(program, [memory], Hub(1), 0, Mesh({}))
        case Way.DEVICE:
            devices = allocated.devices[number]
            one = Window if devices.shares_parameters else SmallWindow
            return one(program, devices, group)
        case Way.HOST | Way.HOST_REPLICATED:
            return among_equals(program, memory, group, replicated=way is Way.HOST_REPLICATED)
        case Way.GLOO:
            return by_gloo(program, memory, group)
        case Way.PARAMETER_SERVER if roles is not None:
            return parameter_server(program, memory, roles, group)
    raise InternalError(f"sync path {way} without roles")
