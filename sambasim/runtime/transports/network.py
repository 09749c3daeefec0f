"""Messages of device sync between nodes, from device memory to device memory: those that `collectives` lists."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sambasim.collectives import all_gather_messages, blocks, port_of, reduce_scatter_messages
from sambasim.ir.program import ParameterGroup
from sambasim.ir.types import DTYPE_BYTES
from sambasim.records.metrics import BytesMoved
from sambasim.records.trace import Track
from sambasim.runtime.machine.communicator import Communicator, Request
from sambasim.runtime.transports.communication import Slices
from sambasim.runtime.values.mean import tree_mean
from sambasim.runtime.values.memory import DeviceMemory, byte_array
from sambasim.runtime.watch.observer import span

_REDUCE_TAG = 11
_GATHER_TAG = 12


def scattered(node_of: Sequence[int]) -> list[str]:
    """A notice if the ranks of a node are no aligned block, so that slices are sent instead of sums."""
    nodes, summed = blocks(node_of)
    if all(summed):
        return []
    travelling = sum(1 if is_sum else len(ranks) for ranks, is_sum in zip(nodes, summed, strict=True))
    count = len(nodes)
    return [
        f"{travelling} gradients of each slice are sent between {count} nodes; it would be {count} sums if each "
        "node held neighbouring ranks, in a block of a power of two (mpirun -ppn, --map-by; srun --ntasks-per-node)"
    ]


class Network:
    """The messages of one rank; none with a single node. `memories`: those of this node, by rank; `slices`: for each
    group, what each rank updates; `moved` counts the bytes."""

    def __init__(
        self, communicator: Communicator, memories: Mapping[int, DeviceMemory], slices: Slices, moved: BytesMoved
    ) -> None:
        self._communicator, self._memories, self._slices, self._moved = communicator, memories, slices, moved
        rank, node_of = communicator.rank, communicator.node_of
        self._own, self._groups = memories[rank], memories[rank].program.groups
        self._reduce, self._gather = reduce_scatter_messages(node_of, rank), all_gather_messages(node_of, rank)
        self.sources = tuple(message.ranks[0] for message in self._reduce.received)
        """The ranks of other nodes that send operands to this rank; the lowest rank stands for a node's sum."""
        lengths = {name: of_ranks[rank][1] - of_ranks[rank][0] for name, of_ranks in slices.items()}
        sizes = {group.name: lengths[group.name] * DTYPE_BYTES[group.dtype] for group in self._groups}
        self.incoming_bytes = {name: size * len(self.sources) for name, size in sizes.items()}
        """By group, the bytes that this rank receives."""
        needed = max(self.incoming_bytes.values(), default=0)
        name = self._own.program.reduce_buffer
        buffer = torch.empty(0, dtype=torch.uint8) if name is None else self._own.tensor(name).view(torch.uint8)
        if buffer.numel() < needed:
            buffer = torch.empty(needed, dtype=torch.uint8)
        self.operands: dict[str, Mapping[int, Tensor]] = {}
        """By group, the buffers for the operands of this rank's slice, by rank of `sources`."""
        for group in self._groups:
            size, dtype = sizes[group.name], getattr(torch, group.dtype)
            parts = [buffer[index * size : (index + 1) * size].view(dtype) for index in range(len(self.sources))]
            self.operands[group.name] = dict(zip(self.sources, parts, strict=True))
        self._sends: list[Request] = []
        self._receives: list[Request] = []

    def post(self, group: ParameterGroup | None) -> None:
        """Begin to receive the operands of `group`, which is reduced next; None if there is none."""
        operands = {} if group is None else self.operands[group.name]
        self._receives = [
            self._communicator.irecv(byte_array(operands[message.ranks[0]]), message.source, _REDUCE_TAG)
            for message in self._reduce.received
            if operands and operands[message.ranks[0]].numel()
        ]

    @span(Track.COLLECTIVES, "send to other nodes")
    def send(self, group: ParameterGroup) -> None:
        """Begin to send `group` to other nodes. All ranks of this node must have completed it."""
        gradient = self._own.region(group, "gradient")
        for message in self._reduce.sent:
            start, stop = self._slices[group.name][message.owner]
            if start < stop:
                if len(message.ranks) > 1:
                    self._sum(group, start, stop)
                part = byte_array(gradient[start:stop])
                self._sends.append(self._communicator.isend(part, message.target, _REDUCE_TAG))

    def holder(self, owner: int) -> int:
        """The rank of this node that receives the slices of `owner`."""
        if owner in self._memories:
            return owner
        return port_of(blocks(self._communicator.node_of), owner, self._communicator.node_index)

    def has_received(self) -> bool:
        """Whether all operands of the next group have arrived."""
        return self._communicator.test_all(self._receives)

    @span(Track.COLLECTIVES, "wait for other nodes")
    def receive(self) -> None:
        self._communicator.wait_all(self._receives)

    def done(self, group: ParameterGroup, following: ParameterGroup | None) -> None:
        self._moved.network += self.incoming_bytes[group.name]
        self.post(following)

    @span(Track.COLLECTIVES, "exchange between nodes")
    def exchange(self, region: str) -> None:
        """Collective. Exchange the slices of `region` of every group with one rank of each other node."""
        communicator = self._communicator
        communicator.wait_all(self._sends)  # received slices may overwrite what is being sent
        self._sends = []
        requests: list[Request] = []
        for group in self._groups:
            tensor, slices = self._own.region(group, region), self._slices[group.name]
            for message in self._gather.sent:
                part = tensor[slice(*slices[message.owner])]
                if part.numel():
                    requests.append(communicator.isend(byte_array(part), message.target, _GATHER_TAG))
            for message in self._gather.received:
                part = tensor[slice(*slices[message.owner])]
                if part.numel():
                    requests.append(communicator.irecv(byte_array(part), message.source, _GATHER_TAG))
                    self._moved.network += part.nbytes
        communicator.wait_all(requests)

    def _sum(self, group: ParameterGroup, start: int, stop: int) -> None:
        """Sum a slice over this node, in place of this rank's own gradient, which no other rank reads."""
        parts = {rank: memory.region(group, "gradient")[start:stop] for rank, memory in sorted(self._memories.items())}
        own = parts[self._communicator.rank]
        tree_mean([*parts.values()], own, 1)()
        self._moved.peer += (len(parts) - 1) * own.nbytes
