"""Creates the memories and transports of replicas, for each sync path: for runs, SambaFlow apps and benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sambasim.errors import InternalError
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, Mesh
from sambasim.ir.program import Program
from sambasim.ir.stages import of_rank
from sambasim.ir.zero import kept
from sambasim.runtime.capacity import check_node_memory
from sambasim.runtime.device import DeviceMemory, private_storage
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.transports.base import Transport, slices_of
from sambasim.runtime.transports.host import Roles, among_equals, by_gloo, parameter_server
from sambasim.runtime.transports.in_process import Hub, InProcess
from sambasim.runtime.transports.on_mesh import OnMesh
from sambasim.runtime.transports.small_window import SmallWindow
from sambasim.runtime.transports.window import Devices, Window, allocate_devices


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
    """The device memories of the ranks of this process; `devices` are those of the node, if it shares them; `group`:
    the communicator of this rank's group along dp, if that is not the whole job."""

    memories: Sequence[DeviceMemory]
    devices: Devices | None = None
    group: Communicator | None = None


def allocate(
    program: Program, communicator: Communicator, way: Way, ranks: int = 1, mesh: Mesh | None = None
) -> Allocated:
    """Collective. Allocate memory for `ranks` ranks of this process. `mesh`: that of the job, if it has other axes than
    dp. Raises MachineError if there is too little."""
    group = None
    if mesh is not None and mesh.size(DATA_PARALLEL) < communicator.world_size:
        group = communicator.subset(mesh.group(communicator.rank, DATA_PARALLEL))
    programs = programs_of(program, mesh, range(communicator.rank, communicator.rank + ranks))
    if way is Way.DEVICE:
        along_dp = group or communicator
        devices = allocate_devices(programs[0], along_dp)
        return Allocated([devices.by_rank[along_dp.rank]], devices, group)
    needed = program.device_bytes * ranks
    if way is Way.HOST:
        along_dp = group or communicator
        owned = {name: of_ranks[along_dp.rank] for name, of_ranks in slices_of(program, along_dp.world_size).items()}
        needed -= sum(one.whole_bytes - one.kept_bytes for one in kept(program, owned))
    check_node_memory(communicator, needed)
    memories = [DeviceMemory(one, private_storage(one.device_bytes)) for one in programs]
    return Allocated(memories, group=group)


def programs_of(program: Program, mesh: Mesh | None, ranks: Sequence[int]) -> Sequence[Program]:
    """The program of each of `ranks`: its part of a pipeline, or all of `program`."""
    if mesh is None or mesh.size(PIPELINE) == 1:
        return [program] * len(ranks)
    stages = [mesh.coordinate(rank, PIPELINE) for rank in ranks]
    of_stages = {at: of_rank(program, at) for at in set(stages)}
    return [of_stages[at] for at in stages]


def connect(
    program: Program,
    communicator: Communicator,
    way: Way,
    allocated: Allocated,
    roles: Roles | None = None,
    mesh: Mesh | None = None,
) -> Sequence[Transport]:
    """Collective. A transport for each rank of this process, whose weights must be in device memory."""
    memories, group = allocated.memories, allocated.group
    if way is Way.IN_PROCESS and communicator.world_size == 1:
        hub = Hub(len(memories))
        return [InProcess(memory.program, memories, hub, rank, mesh) for rank, memory in enumerate(memories)]
    program = memories[0].program
    along_dp = _along_dp(program, group or communicator, way, allocated, roles)
    return [along_dp if group is None or mesh is None else OnMesh(program, along_dp, communicator, mesh)]


def _along_dp(program: Program, group: Communicator, way: Way, allocated: Allocated, roles: Roles | None) -> Transport:
    memory, devices = allocated.memories[0], allocated.devices
    match way:
        case Way.IN_PROCESS:
            return InProcess(program, [memory], Hub(1), 0, Mesh({}))
        case Way.DEVICE if devices is not None:
            one = Window if devices.shares_parameters else SmallWindow
            return one(program, devices, group)
        case Way.HOST | Way.HOST_REPLICATED:
            return among_equals(program, memory, group, replicated=way is Way.HOST_REPLICATED)
        case Way.GLOO:
            return by_gloo(program, memory, group)
        case Way.PARAMETER_SERVER if roles is not None:
            return parameter_server(program, memory, roles, group)
    raise InternalError(f"sync path {way} without shared devices or roles")
