"""Sync through the host, as a SambaFlow run without `--reduce-on-rdu` does it.

    REDUCE   device -> host: all gradients;  MPI: slice r of every replica to rank r, which adds them;
             host -> device: the mean of the owned slice
    GATHER   device -> host: the owned slice of the parameters;  MPI: every slice to every rank;
             host -> device: the slices of the others

The copies between device and host are real, and so are the host's buffers.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sambasim.collectives.slices import Slice
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.ir.types import DTYPE_BYTES
from sambasim.runtime.arguments import Arguments
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.sync.collect import bytes_of, collect
from sambasim.runtime.sync.interface import slices_of
from sambasim.runtime.sync.mean import tree_mean
from sambasim.runtime.sync.numbers import all_gather_floats, gather_norms
from sambasim.runtime.sync.phased import PhasedSync


class HostSync(PhasedSync):
    """Device to host, exchange between hosts by MPI, host to device."""

    def __init__(
        self,
        program: Program,
        arguments: Arguments,
        optimizers: Optimizers,
        memory: DeviceMemory,
        communicator: Communicator,
    ) -> None:
        super().__init__(program, arguments, optimizers, memory)
        self._communicator = communicator
        self._rank = communicator.topology.rank
        self._world_size = communicator.topology.world_size
        self._slices = slices_of(program, self._world_size)
        largest = max((group.numel * DTYPE_BYTES[group.dtype] for group in program.groups), default=0)
        self._outgoing = torch.empty(largest, dtype=torch.uint8)
        # A rank receives its own slice from everybody: at most one granule more than the group in all, for each rank.
        incoming = max((self._incoming_bytes(group) for group in program.groups), default=0)
        self._incoming = torch.empty(max(largest, incoming), dtype=torch.uint8)

    @property
    def title(self) -> str:
        return "host (device to host, MPI, host to device)"

    def owned(self, group: ParameterGroup) -> Slice:
        return self._slices[group.name][self._rank]

    def reduce(self) -> None:
        for group in self.program.groups:
            self._reduce_group(group)

    def gather(self) -> None:
        for group in self.program.groups:
            self._gather_parameters(group)

    def gather_norms(self, sums: Mapping[str, Sequence[float]]) -> list[float]:
        return gather_norms(self.program, self._slices, self._communicator, sums)

    def gather_losses(self, losses: Sequence[float]) -> Sequence[float]:
        return all_gather_floats(self._communicator, losses, [1] * self._world_size)

    def whole_state(self, group: ParameterGroup, member: Member, state: str) -> Tensor | None:
        own = {self._rank: self.memory.region(group, state)}
        return collect(self._communicator, own, self._slices[group.name], member)

    def _reduce_group(self, group: ParameterGroup) -> None:
        device = self.memory.region(group, "gradient")
        host = self._view(self._outgoing, group, group.numel)
        host.copy_(device)
        self.bytes_moved.device_to_host += host.nbytes
        start, stop = self.owned(group)
        received = self._view(self._incoming, group, (stop - start) * self._world_size)
        element_bytes = DTYPE_BYTES[group.dtype]
        self._communicator.all_to_all(
            bytes_of(host),
            [(b - a) * element_bytes for a, b in self._slices[group.name]],
            bytes_of(received),
            [(stop - start) * element_bytes] * self._world_size,
        )
        self.bytes_moved.network += (stop - start) * element_bytes * (self._world_size - 1)
        operands = received.view(self._world_size, stop - start).unbind(0)
        mean = host[start:stop]
        tree_mean(operands, mean, self.divisor)
        device[start:stop].copy_(mean)
        self.bytes_moved.host_to_device += mean.nbytes

    def _gather_parameters(self, group: ParameterGroup) -> None:
        device = self.memory.region(group, "parameter")
        start, stop = self.owned(group)
        element_bytes = DTYPE_BYTES[group.dtype]
        host = self._view(self._incoming, group, group.numel)
        own = host[start:stop]
        own.copy_(device[start:stop])
        self.bytes_moved.device_to_host += own.nbytes
        counts = [(b - a) * element_bytes for a, b in self._slices[group.name]]
        self._communicator.all_gather(bytes_of(own), bytes_of(host), counts)
        self.bytes_moved.network += host.nbytes - own.nbytes
        for others in (slice(0, start), slice(stop, group.numel)):
            device[others].copy_(host[others])
        self.bytes_moved.host_to_device += host.nbytes - own.nbytes

    def _incoming_bytes(self, group: ParameterGroup) -> int:
        start, stop = self.owned(group)
        return (stop - start) * self._world_size * DTYPE_BYTES[group.dtype]

    @staticmethod
    def _view(buffer: Tensor, group: ParameterGroup, numel: int) -> Tensor:
        dtype: torch.dtype = getattr(torch, group.dtype)
        return buffer[: numel * DTYPE_BYTES[group.dtype]].view(dtype)
