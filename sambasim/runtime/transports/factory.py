"""Creates the memories and transports of replicas, for each sync path: for runs, SambaFlow apps and benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sambasim.errors import InternalError
from sambasim.ir.program import Program
from sambasim.runtime.capacity import check_node_memory
from sambasim.runtime.device import DeviceMemory, private_storage
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.transports.base import Transport
from sambasim.runtime.transports.host import Roles, among_equals, by_gloo, parameter_server
from sambasim.runtime.transports.in_process import Hub, InProcess
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
    """The device memories of the replicas of this process; `devices` are those of the node, if it shares them."""

    memories: Sequence[DeviceMemory]
    devices: Devices | None = None


def allocate(program: Program, communicator: Communicator, way: Way, replicas: int = 1) -> Allocated:
    """Collective. Allocate memory for `replicas` replicas. Raises MachineError if there is too little."""
    if way is Way.DEVICE:
        devices = allocate_devices(program, communicator)
        return Allocated([devices.by_rank[communicator.rank]], devices)
    check_node_memory(communicator, program.device_bytes * replicas)
    return Allocated([DeviceMemory(program, private_storage(program.device_bytes)) for _ in range(replicas)])


def connect(
    program: Program, communicator: Communicator, way: Way, allocated: Allocated, roles: Roles | None = None
) -> Sequence[Transport]:
    """Collective. A transport for each replica of this process, whose weights must be in device memory."""
    memories = allocated.memories
    match way:
        case Way.IN_PROCESS:
            hub = Hub(len(memories))
            return [InProcess(program, memories, hub, number) for number in range(len(memories))]
        case Way.DEVICE if allocated.devices is not None:
            one = Window if allocated.devices.shares_parameters else SmallWindow
            return [one(program, allocated.devices, communicator)]
        case Way.HOST | Way.HOST_REPLICATED:
            return [among_equals(program, memories[0], communicator, replicated=way is Way.HOST_REPLICATED)]
        case Way.GLOO:
            return [by_gloo(program, memories[0], communicator)]
        case Way.PARAMETER_SERVER if roles is not None:
            return [parameter_server(program, memories[0], roles, communicator)]
    raise InternalError(f"sync path {way} without shared devices or roles")
