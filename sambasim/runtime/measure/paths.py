"""The all-reduce paths that `bench` measures: each can be refilled, run, and asked for its result.

    device        gradients in device memory, one window per node: as `run --reduce-on-rdu` does it for a program of
                  so many gradients
    host-...      device to host, between hosts as `run --host-sync ...` does it, host to device
    mpi           MPI's own Allreduce, from one host buffer to another; no sync path uses it
    mpi-in-place  the same in one buffer
    gloo          torch.distributed's all_reduce on gloo, in place, as DistributedDataParallel uses it on CPUs

The copy bound is measured like a path: each rank copies its part of (n + 1) / 2 buffers. Before each run the operands
are written again and the previous result is overwritten with NaN, so a path that does nothing gives a wrong result.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor

from sambasim.errors import InternalError, MachineError, SambasimError
from sambasim.ir.program import Program
from sambasim.runtime import capacity
from sambasim.runtime.communicator import MpiCommunicator
from sambasim.runtime.device import DeviceMemory, private_storage
from sambasim.runtime.measure.operands import ELEMENT_BYTES, PERIOD_ELEMENTS, Expected, Operands, fill
from sambasim.runtime.ranks import Communicator, SharedWindow
from sambasim.runtime.transports.factory import Allocated, Way, connect
from sambasim.runtime.transports.host import roles_of
from sambasim.runtime.transports.small_window import SmallWindow
from sambasim.runtime.transports.window import Devices, Window, is_small
from sambasim.runtime.transports.window_reduce import WindowReduce


@dataclass(frozen=True, slots=True)
class Setting:
    """The resources of the paths at one size.

    window: contains the device memories of the node; None if the device path is not measured
    memory: private device memory, for the paths through the host
    operand, result: private buffers of the size of the program's group, for the other paths
    """

    program: Program
    communicator: Communicator
    window: SharedWindow | None
    memory: DeviceMemory
    operand: Tensor
    result: Tensor


class Measured(ABC):
    """A measured path. `run` is collective, and the part that is timed."""

    name: ClassVar[str]
    wrong_result: ClassVar[type[SambasimError]] = InternalError
    """The error for a wrong result: InternalError for our code, MachineError for a library."""

    @abstractmethod
    def refill(self, block: Tensor) -> None:
        """Fill this rank's operand with repetitions of `block`."""

    @abstractmethod
    def run(self) -> None:
        """Run once; afterwards this rank may read the result."""

    @abstractmethod
    def readable(self) -> Iterator[tuple[int, Tensor]]:
        """All parts of the result, each with the index of its first element."""

    @abstractmethod
    def expected(self, operands: Operands) -> Expected:
        """The expected result."""


class AllReduce(Measured):
    """A path that leaves `result` on every rank; `checked` for equal bits or for rounding errors."""

    result: ClassVar[Literal["mean", "sum"]]
    checked: ClassVar[Literal["bits", "rounding"]]

    def expected(self, operands: Operands) -> Expected:
        if self.checked == "bits":
            return operands.mean
        return operands.near_mean if self.result == "mean" else operands.near_sum


@final
class DevicePath(AllReduce):
    """REDUCE of device sync. Of a small program each rank has all means; otherwise each slice is read from its owner or
    from the rank of this node that received it."""

    name = "device"
    result = "mean"
    checked = "bits"

    def __init__(self, setting: Setting) -> None:
        if setting.window is None:
            raise InternalError("the device path without device memory")
        program, topology = setting.program, setting.communicator.topology
        by_rank = {
            rank: DeviceMemory(program, setting.window.of(index)[: program.device_bytes])
            for index, rank in enumerate(topology.local_ranks)
        }
        devices = Devices(setting.window, by_rank, shares_parameters=not is_small(program, topology))
        allocated = Allocated([by_rank[topology.rank]], devices)
        (transport,) = connect(program, setting.communicator, Way.DEVICE, allocated)
        self._own = by_rank[topology.rank].region(program.groups[0], "gradient")
        if isinstance(transport, SmallWindow):
            self._reduce: Callable[[], None] = partial(_reduce_small, transport)
            self._parts = tuple(transport.mean_parts(program.groups[0]))
        elif isinstance(transport, Window):
            self._reduce = partial(_reduce_in_window, transport, transport.reduce_scatter(program.groups))
            self._parts = tuple(transport.means(program.groups[0]))

    def refill(self, block: Tensor) -> None:
        fill(self._own, block)

    def run(self) -> None:
        self._reduce()

    def readable(self) -> Iterator[tuple[int, Tensor]]:
        yield from self._parts


def _reduce_small(transport: SmallWindow) -> None:
    transport.wait_for_readers()
    transport.reduce()


def _reduce_in_window(transport: Window, reduce: WindowReduce) -> None:
    """REDUCE without an optimizer; the means are sent to all other nodes."""
    reduce.begin_step()
    reduce.begin()
    reduce.finish()
    transport.spread()
    transport.meet()


class HostPath(AllReduce):
    """REDUCE and GATHER of a host sync path, in this rank's device memory."""

    result = "mean"
    way: ClassVar[Way]

    def __init__(self, setting: Setting) -> None:
        program, roles = setting.program, roles_of(setting.communicator.world_size, dedicated=0)
        (transport,) = connect(program, setting.communicator, self.way, Allocated([setting.memory]), roles)
        both = transport.reduce_scatter(program.groups), transport.all_gather(program.groups)
        self._communications = [one for one in both if one is not None]
        self._gradient = setting.memory.region(program.groups[0], "gradient")

    def refill(self, block: Tensor) -> None:
        fill(self._gradient, block)

    def run(self) -> None:
        for communication in self._communications:
            communication.begin()
            communication.finish()

    def readable(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self._gradient


@final
class HostMpiPath(HostPath):
    """Slices exchanged by MPI."""

    name = "host-mpi"
    checked = "bits"
    way = Way.HOST


@final
class HostGlooPath(HostPath):
    """All-reduce by gloo; the process group must be initialized."""

    name = "host-gloo"
    checked = "rounding"
    way = Way.GLOO


@final
class HostServerPath(HostPath):
    """A parameter server on rank 0, which also has a replica."""

    name = "host-parameter-server"
    checked = "bits"
    way = Way.PARAMETER_SERVER


class MpiReduction(AllReduce):
    """MPI_Allreduce, between two buffers or `in_place`."""

    in_place: ClassVar[bool]
    result = "sum"
    checked = "rounding"
    wrong_result = MachineError

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
    """torch.distributed.all_reduce; the process group must be initialized."""

    name = "gloo"
    result = "sum"
    checked = "rounding"
    wrong_result = MachineError

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
    """The copy bound: copies this rank's part between two private buffers."""

    name = "copy"
    wrong_result = MachineError

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
"""By name, in display order."""

THROUGH_GLOO = frozenset({HostGlooPath.name, GlooPath.name})
"""Paths that need a process group of `torch.distributed`."""


def _spoil(result: Tensor) -> None:
    """Overwrite some elements of the previous result, so that a path that does nothing gives a wrong one."""
    result[::PERIOD_ELEMENTS] = torch.nan


def private_buffers(numel: int) -> tuple[Tensor, Tensor]:
    """An operand and a result, float32 [numel] each, in huge pages like device memory, with all pages touched."""
    operand, result = (torch.from_numpy(private_storage(numel * ELEMENT_BYTES)).view(torch.float32) for _ in range(2))
    return operand.zero_(), result.zero_()


_OF_MPI = frozenset({MpiPath.name, MpiInPlacePath.name})
_THROUGH_HOST = frozenset({HostMpiPath.name, HostGlooPath.name, HostServerPath.name})


def needed_bytes(size_bytes: int, paths: Collection[str], rank: int, node_count: int) -> int:
    """Estimated bytes that `rank` needs to measure `paths` at one size. Only buffers of this size count."""
    buffers = 2  # operand and result: those of the copy bound, of MPI and of gloo
    if DevicePath.name in paths:
        buffers += 1 if node_count == 1 else 2  # gradients in the window; what arrives from other nodes
    if not _THROUGH_HOST.isdisjoint(paths):
        buffers += 1  # gradients in private device memory
    if HostGlooPath.name in paths:
        buffers += 1  # the same on the host
    if HostServerPath.name in paths and rank == 0:
        buffers += 1  # what it serves
    if not _OF_MPI.isdisjoint(paths):
        buffers += 1  # MPI's own, in which it receives what it adds
    return buffers * size_bytes


def check_host_memory(communicator: Communicator, size_bytes: int, paths: Collection[str]) -> None:
    """Collective. Raises MachineError, the same on every rank, if a node lacks the memory to measure this size."""
    topology = communicator.topology
    needed = needed_bytes(size_bytes, paths, topology.rank, topology.node_count)
    capacity.check_node_memory(
        communicator,
        needed,
        what="the memory for the buffers of this node's ranks",
        remedy="measure smaller sizes (--min-bytes, --max-bytes) or fewer --paths, or start fewer ranks",
    )
