"""Sync directly between devices: `--reduce-on-rdu`.

Device memory is a window that all ranks of the node share, so a replica reads its peers' gradients where they lie:
no staging copy, and no host buffer. The owner of a slice adds the replicas' slices in the order of the tree, and
writes the mean over its own; nobody else reads that part of it.

    REDUCE   node barrier: all gradients are there.  Owned slice: mean of all replicas' slices
    OPT      the owner updates its slice of the parameters
    GATHER   node barrier: all slices are updated.  Other slices: copied from their owners

Between nodes the slices travel by MPI, from device memory to device memory: a replica's slice of the gradients goes
once, to its owner, into the reduce operand buffer; an updated slice of the parameters goes once to each other node,
where one rank receives it and the others read it there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sambasim.collectives.slices import CUT_ELEMENTS, Slice, pieces
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.types import DTYPE_BYTES
from sambasim.runtime.arguments import Arguments
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.ranks import Communicator, Request, SharedWindow
from sambasim.runtime.sync.interface import GradientSync, slices_of
from sambasim.runtime.sync.mean import tree_mean
from sambasim.runtime.sync.norms import gather_norms

_REDUCE_TAG = 11
_GATHER_TAG = 12


@dataclass(frozen=True, slots=True)
class Devices:
    """The device memories of this node's ranks, by world rank, all in one window."""

    window: SharedWindow
    by_rank: Mapping[int, DeviceMemory]


def allocate_devices(program: Program, communicator: Communicator) -> Devices:
    """Collective. Device memory for every rank of the node, in one shared window.

    Raises MachineError if the node lacks shared memory.
    """
    window = communicator.allocate_shared(program.device_bytes)
    local_ranks = communicator.topology.local_ranks
    own = communicator.topology.rank
    storages = {rank: window.local if rank == own else window.of(index) for index, rank in enumerate(local_ranks)}
    return Devices(window, {rank: DeviceMemory(program, storage) for rank, storage in storages.items()})


class DeviceSync(GradientSync):
    """Owners read their peers' device memory."""

    def __init__(self, program: Program, arguments: Arguments, devices: Devices, communicator: Communicator) -> None:
        super().__init__(program, arguments)
        self._devices = devices
        self._communicator = communicator
        self._topology = communicator.topology
        self._rank = self._topology.rank
        self._memory = devices.by_rank[self._rank]
        self._slices = slices_of(program, self._topology.world_size)
        self._remote = tuple(r for r in range(self._topology.world_size) if r not in devices.by_rank)

    @property
    def title(self) -> str:
        return "device (peers' device memory)"

    def owned(self, group: ParameterGroup) -> Slice:
        return self._slices[group.name][self._rank]

    def reduce(self) -> None:
        self._node_barrier()
        for group in self.program.groups:
            self._reduce_group(group)

    def gather(self, regions: Sequence[str] = ("parameter",)) -> None:
        self._node_barrier()
        if self._remote:
            requests = [
                request
                for region in regions
                for group in self.program.groups
                for request in self._exchange(group, region)
            ]
            self._communicator.wait_all(requests)
            self._node_barrier()
        for group in self.program.groups:
            for region in regions:
                self._copy_slices(group, region)

    def gather_norms(self, sums: Mapping[str, Sequence[float]]) -> list[float]:
        return gather_norms(self.program, self._slices, self._communicator, sums)

    def _node_barrier(self) -> None:
        self._devices.window.sync()
        self._communicator.node_barrier()
        self._devices.window.sync()

    def _gradient(self, rank: int, group: ParameterGroup) -> Tensor:
        return self._devices.by_rank[rank].region(group, "gradient")

    def _reduce_group(self, group: ParameterGroup) -> None:
        sends = self._send_operands(group)
        start, stop = self.owned(group)
        mean = self._gradient(self._rank, group)[start:stop]
        local = {rank: self._gradient(rank, group)[start:stop] for rank in self._devices.by_rank}
        for a, b in pieces(0, stop - start, self._piece(group, self._rank)):
            received = self._receive_operands(group, b - a)
            operands = [received[r] if r in received else local[r][a:b] for r in range(self._topology.world_size)]
            tree_mean(operands, mean[a:b], self.divisor)
        self._communicator.wait_all(sends)
        self.bytes_moved.peer += (len(local) - 1) * mean.nbytes
        self.bytes_moved.network += len(self._remote) * mean.nbytes

    def _piece(self, group: ParameterGroup, owner: int) -> int:
        """How many elements of its slice `owner` reduces at a time: the operands of all ranks of other nodes fit the
        reduce buffer, and every rank can work out the number."""
        operands = sum(node != self._topology.node_of[owner] for node in self._topology.node_of)
        if not operands:
            return max(group.numel, 1)
        room = self._memory.reduce_buffer.numel() // DTYPE_BYTES[group.dtype]
        return max(room // operands // CUT_ELEMENTS, 1) * CUT_ELEMENTS

    def _send_operands(self, group: ParameterGroup) -> list[Request]:
        gradient = self._gradient(self._rank, group)
        requests = []
        for owner in self._remote:
            start, stop = self._slices[group.name][owner]
            for a, b in pieces(start, stop, self._piece(group, owner)):
                requests.append(self._communicator.isend(_bytes(gradient[a:b]), owner, _REDUCE_TAG))
        return requests

    def _receive_operands(self, group: ParameterGroup, numel: int) -> dict[int, Tensor]:
        if not self._remote:
            return {}
        dtype: torch.dtype = getattr(torch, group.dtype)
        buffer = self._memory.reduce_buffer.view(dtype)
        if len(self._remote) * numel > buffer.numel():  # a group of a few elements, and more ranks than it has
            buffer = torch.empty(len(self._remote) * numel, dtype=dtype)
        operands = {rank: buffer[i * numel : (i + 1) * numel] for i, rank in enumerate(self._remote)}
        requests = [self._communicator.irecv(_bytes(operand), rank, _REDUCE_TAG) for rank, operand in operands.items()]
        self._communicator.wait_all(requests)
        return operands

    def _port(self, owner: int, node: int) -> int:
        """The rank of `node` that receives the slices of `owner`, a rank of another node, for all of its node."""
        ranks = [rank for rank, its_node in enumerate(self._topology.node_of) if its_node == node]
        return ranks[owner % len(ranks)]

    def _exchange(self, group: ParameterGroup, region: str) -> list[Request]:
        """Send the owned slice to every other node; receive the slices for which this rank is its node's port."""
        tensor = self._memory.region(group, region)
        start, stop = self.owned(group)
        requests = []
        if stop > start:
            for node in set(self._topology.node_of) - {self._topology.node_index}:
                target = self._port(self._rank, node)
                requests.append(self._communicator.isend(_bytes(tensor[start:stop]), target, _GATHER_TAG))
        for owner in self._remote:
            a, b = self._slices[group.name][owner]
            if b > a and self._port(owner, self._topology.node_index) == self._rank:
                requests.append(self._communicator.irecv(_bytes(tensor[a:b]), owner, _GATHER_TAG))
                self.bytes_moved.network += tensor[a:b].nbytes
        return requests

    def _copy_slices(self, group: ParameterGroup, region: str) -> None:
        own = self._memory.region(group, region)
        for owner, (a, b) in enumerate(self._slices[group.name]):
            holder = owner if owner in self._devices.by_rank else self._port(owner, self._topology.node_index)
            if holder != self._rank and b > a:
                own[a:b].copy_(self._devices.by_rank[holder].region(group, region)[a:b])
                self.bytes_moved.peer += own[a:b].nbytes


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The tensor's memory as bytes, for MPI."""
    array: NDArray[np.uint8] = tensor.view(torch.uint8).numpy()
    return array
