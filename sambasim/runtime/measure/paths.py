"""The ways of an all-reduce that are measured: each can be refilled, run, and asked for its result.

    device        gradients in device memory, one window of the node: `run --reduce-on-rdu`, in the way that a program
                  of so many gradients takes
    host-...      device to host, between hosts as `run --host-sync ...` does it, host to device
    mpi           MPI's own Allreduce, from one host buffer to another; no sync path uses it
    mpi-in-place  the same in one buffer
    gloo          torch.distributed's all_reduce on gloo, in place, as DistributedDataParallel uses it on CPUs

The copy bound is measured like one of them: each rank copies its part of (n + 1) / 2 buffers. Before each run operands
are written anew, and what the run before left is spoiled: to do nothing gives a wrong result.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor

from sambasim.errors import InternalError, MachineError, SambasimError
from sambasim.ir.program import Program
from sambasim.runtime.communicator import MpiCommunicator
from sambasim.runtime.device import DeviceMemory, private_storage
from sambasim.runtime.measure.flat_program import ELEMENT_BYTES
from sambasim.runtime.measure.operands import PERIOD_ELEMENTS, Expected, Operands, fill
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.ranks import Communicator, SharedWindow
from sambasim.runtime.sync.device import DeviceSync
from sambasim.runtime.sync.device_memories import Devices, is_small
from sambasim.runtime.sync.gloo import GlooSync
from sambasim.runtime.sync.host import HostSync
from sambasim.runtime.sync.parameter_server import ParameterServerSync, roles
from sambasim.runtime.sync.phased import PhasedSync
from sambasim.runtime.sync.small_device import SmallDeviceSync


@dataclass(frozen=True, slots=True)
class Setting:
    """What the paths of one size are made of.

    window: in which the device memories of the node lie; None if the device path is not measured
    memory: private device memory, for the paths through the host
    operand, result: private buffers of the program's one group, for those paths that have no memory of their own
    """

    program: Program
    communicator: Communicator
    window: SharedWindow | None
    memory: DeviceMemory
    operand: Tensor
    result: Tensor

    @property
    def arguments(self) -> Mapping[str, int]:
        """The runtime arguments: what a sum is divided by."""
        return {"dp_scale_factor": self.communicator.topology.world_size}

    @property
    def optimizers(self) -> Optimizers:
        """What a sync on `memory` is given; nothing here updates a parameter."""
        return Optimizers(self.program, self.memory, self.arguments)


class Measured(ABC):
    """One way. `run` is what is timed, and collective."""

    name: ClassVar[str]
    blame: ClassVar[type[SambasimError]] = InternalError
    """The error that a wrong result is: ours, or one of a library of this machine."""

    @abstractmethod
    def refill(self, block: Tensor) -> None:
        """This rank's operand becomes `block`, again and again."""

    @abstractmethod
    def run(self) -> None:
        """Once, from operands to results that this rank may read."""

    @abstractmethod
    def readable(self) -> Iterator[tuple[int, Tensor]]:
        """The parts of the result, each with the number of its first element; together all of it."""

    @abstractmethod
    def expected(self, operands: Operands) -> Expected:
        """What the result must be."""


class AllReduce(Measured):
    """A way that leaves `result` on every rank, which is `checked` for its bits, or for its rounding error."""

    result: ClassVar[Literal["mean", "sum"]]
    checked: ClassVar[Literal["bits", "rounding"]]

    def expected(self, operands: Operands) -> Expected:
        if self.checked == "bits":
            return operands.mean
        return operands.near_mean if self.result == "mean" else operands.near_sum


@final
class DevicePath(AllReduce):
    """REDUCE of device sync. Of few gradients each rank has all means; else it finds each slice's in the memory of its
    owner, or of the rank of its node that received it."""

    name = "device"
    result = "mean"
    checked = "bits"

    def __init__(self, setting: Setting) -> None:
        if setting.window is None:
            raise InternalError("the device path without device memory")
        program, topology = setting.program, setting.communicator.topology
        memories = {
            rank: DeviceMemory(program, setting.window.of(index)[: program.device_bytes])
            for index, rank in enumerate(topology.local_ranks)
        }
        own = memories[topology.rank]
        optimizers = Optimizers(program, own, setting.arguments)
        devices = Devices(setting.window, memories)
        one = SmallDeviceSync if is_small(program, topology) else DeviceSync
        self._sync = one(program, setting.arguments, optimizers, devices, setting.communicator)
        self._own = own.region(program.groups[0], "gradient")
        self._parts = tuple(self._sync.means(program.groups[0]))

    def refill(self, block: Tensor) -> None:
        fill(self._own, block)

    def run(self) -> None:
        self._sync.reduce_alone()

    def readable(self) -> Iterator[tuple[int, Tensor]]:
        yield from self._parts


class HostPath(AllReduce):
    """REDUCE and GATHER of a sync through the host, from this rank's device memory to the same."""

    result = "mean"

    def __init__(self, setting: Setting) -> None:
        self._sync = self._made(setting)
        self._gradient = setting.memory.region(setting.program.groups[0], "gradient")

    @staticmethod
    @abstractmethod
    def _made(setting: Setting) -> PhasedSync:
        """The sync, on the setting's memory."""

    def refill(self, block: Tensor) -> None:
        fill(self._gradient, block)

    def run(self) -> None:
        self._sync.reduce()
        self._sync.gather()

    def readable(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self._gradient


@final
class HostMpiPath(HostPath):
    """An exchange among equals by MPI."""

    name = "host-mpi"
    checked = "bits"

    @staticmethod
    def _made(setting: Setting) -> PhasedSync:
        return HostSync(setting.program, setting.arguments, setting.optimizers, setting.memory, setting.communicator)


@final
class HostGlooPath(HostPath):
    """By gloo; the process group must be up."""

    name = "host-gloo"
    checked = "rounding"

    @staticmethod
    def _made(setting: Setting) -> PhasedSync:
        return GlooSync(setting.program, setting.arguments, setting.optimizers, setting.memory, setting.communicator)


@final
class HostServerPath(HostPath):
    """By a parameter server on rank 0, which works too."""

    name = "host-parameter-server"
    checked = "bits"

    @staticmethod
    def _made(setting: Setting) -> PhasedSync:
        who = roles(setting.communicator.topology.world_size, dedicated=0)
        return ParameterServerSync(setting.program, setting.arguments, setting.memory, who, setting.communicator)


class MpiReduction(AllReduce):
    """MPI_Allreduce, from one buffer to another or `in_place`."""

    in_place: ClassVar[bool]
    result = "sum"
    checked = "rounding"
    blame = MachineError

    def __init__(self, setting: Setting) -> None:
        if not isinstance(setting.communicator, MpiCommunicator):
            raise InternalError("MPI's Allreduce without MPI")
        self._reduce = setting.communicator.all_reduce_sum_for_comparison
        self._operand = setting.operand
        self._result = setting.operand if self.in_place else setting.result
        self._send = None if self.in_place else self._operand.numpy()
        self._receive = self._result.numpy()

    def refill(self, block: Tensor) -> None:
        _spoil(self._result)
        fill(self._operand, block)

    def run(self) -> None:
        self._reduce(self._send, self._receive)

    def readable(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self._result


@final
class MpiPath(MpiReduction):
    name = "mpi"
    in_place = False


@final
class MpiInPlacePath(MpiReduction):
    name = "mpi-in-place"
    in_place = True


@final
class GlooPath(AllReduce):
    """torch.distributed.all_reduce; the process group must be up."""

    name = "gloo"
    result = "sum"
    checked = "rounding"
    blame = MachineError

    def __init__(self, setting: Setting) -> None:
        self._buffer = setting.operand

    def refill(self, block: Tensor) -> None:
        fill(self._buffer, block)

    def run(self) -> None:
        dist.all_reduce(self._buffer)

    def readable(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self._buffer


@final
class CopyBound(Measured):
    """The copy bound: this rank's part, from one private buffer to another."""

    name = "copy"
    blame = MachineError

    def __init__(self, setting: Setting) -> None:
        ranks = setting.communicator.topology.world_size
        numel = setting.operand.numel() * (ranks + 1) // (2 * ranks)
        self._source, self._target = setting.operand[:numel], setting.result[:numel]
        self.bytes_of_all_ranks = ranks * self._source.nbytes

    def refill(self, block: Tensor) -> None:
        _spoil(self._target)
        fill(self._source, block)

    def run(self) -> None:
        self._target.copy_(self._source)

    def readable(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self._target

    def expected(self, operands: Operands) -> Expected:
        return Expected(operands.own)


PATHS: Mapping[str, Callable[[Setting], AllReduce]] = {
    path.name: path
    for path in (DevicePath, HostMpiPath, HostGlooPath, HostServerPath, MpiPath, MpiInPlacePath, GlooPath)
}
"""By name, in the order in which they are shown."""

THROUGH_GLOO = frozenset({HostGlooPath.name, GlooPath.name})
"""Those that need a process group of `torch.distributed`."""


def _spoil(result: Tensor) -> None:
    """What the run before left is no result of the next one. So few elements cost no time of their own."""
    result[::PERIOD_ELEMENTS] = torch.nan


def private_buffers(numel: int) -> tuple[Tensor, Tensor]:
    """An operand and a result, float32 [numel] each, with all pages touched; in huge ones, as devices are."""
    operand, result = (torch.from_numpy(private_storage(numel * ELEMENT_BYTES)).view(torch.float32) for _ in range(2))
    return operand.zero_(), result.zero_()
