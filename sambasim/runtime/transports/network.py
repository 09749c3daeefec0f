"""What device sync sends between nodes: by MPI, from device memory to device memory.

gradients    Where a node holds an aligned block of ranks, it sends each owner elsewhere one sum of its slice, which
             one of its ranks adds up; otherwise each replica sends its own slice. They arrive in the reduce operand
             buffer, one group at a time, while the backward still goes on.
parameters   An owner sends its updated slice once to each other node, where one rank receives it into the
             parameters of the node.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sambasim.collectives.schedule import all_gather_messages, port_of, reduce_scatter_messages
from sambasim.collectives.tree import blocks, inside
from sambasim.ir.program import ParameterGroup
from sambasim.ir.types import DTYPE_BYTES
from sambasim.records.trace import Track
from sambasim.runtime.device import bytes_of
from sambasim.runtime.mean import TreeMean
from sambasim.runtime.observer import StepObserver, span
from sambasim.runtime.ranks import Request

if TYPE_CHECKING:
    from sambasim.runtime.transports.window import Window

_REDUCE_TAG = 11
_GATHER_TAG = 12


def scattered(node_of: Sequence[int]) -> list[str]:
    """A notice, if the ranks of a node are no block whose sum could travel in their place; `node_of` is by rank."""
    layout = blocks(node_of)
    alone = sum(len(ranks) for ranks, summed in zip(layout.nodes, layout.summed, strict=True) if not summed)
    if not alone:
        return []
    nodes = len(layout.nodes)
    travelling = sum(len(layout.travelling(node)) for node in range(nodes))
    return [
        f"{travelling} gradients of each slice travel between {nodes} nodes, where {nodes} sums would if "
        "each node held neighbouring ranks, in a block of a power of two (mpirun -ppn, --map-by)"
    ]


class Network:
    """One rank's messages. With one node there are none."""

    def __init__(self, window: "Window") -> None:
        program, communicator = window.program, window.communicator
        self.observer: StepObserver | None = None
        self.replica = window.replica
        self._program = program
        self._memories = window.by_rank
        self._slices = window.slices
        self._communicator = communicator
        self._moved = window.bytes_moved
        self._topology = communicator.topology
        self._rank = self._topology.rank
        self._own = self._memories[self._rank]
        node_of = self._topology.node_of
        self._layout = blocks(node_of)
        self._reduce = reduce_scatter_messages(node_of, self._rank)
        self._gather = all_gather_messages(node_of, self._rank)
        self.sources = tuple(message.ranks[0] for message in self._reduce.received)
        """The ranks of other nodes whose operands arrive here; a node's sum counts as its lowest rank's."""
        self._buffer = self._operand_buffer()
        self._operands = {group.name: self._place_operands(group) for group in program.groups}
        self._queue: list[ParameterGroup] = []
        self._sends: list[Request] = []
        self._receives: list[Request] = []

    def operands(self, group: ParameterGroup) -> Mapping[int, Tensor]:
        """By rank of `sources`, where the operands for this rank's slice of `group` arrive."""
        return self._operands[group.name]

    def begin_step(self, groups: Sequence[ParameterGroup]) -> None:
        """A step begins, in which groups are reduced in the order of `groups`."""
        if self.sources:
            self._queue = list(groups)
            self._post()

    def send(self, group: ParameterGroup) -> None:
        """Begin to send what other nodes need of `group`, which all ranks of this node have completed."""
        if self.sources:
            self._send(group)

    @span(Track.COLLECTIVES, "send to other nodes")
    def _send(self, group: ParameterGroup) -> None:
        gradient = self._own.region(group, "gradient")
        for message in self._reduce.sent:
            start, stop = self._slices[group.name][message.owner]
            if start == stop:
                continue
            if len(message.ranks) > 1:
                self._sum(group, start, stop)
            self._sends.append(self._communicator.isend(bytes_of(gradient[start:stop]), message.target, _REDUCE_TAG))

    def holder(self, owner: int) -> int:
        """The rank of this node in whose memory the slices of `owner` are once they have come."""
        return owner if owner in self._memories else port_of(self._layout, owner, self._topology.node_index)

    def has_received(self) -> bool:
        """Whether all operands of the next group have arrived."""
        return not self.sources or self._communicator.test_all(self._receives)

    def receive(self) -> None:
        """Wait until all operands of the next group have arrived."""
        if self.sources:
            self._receive()

    @span(Track.COLLECTIVES, "wait for other nodes")
    def _receive(self) -> None:
        self._communicator.wait_all(self._receives)

    def done(self, group: ParameterGroup) -> None:
        """`group` is reduced: the operand buffer is free for the next."""
        if not self.sources:
            return
        self._moved.network += sum(operand.nbytes for operand in self._operands[group.name].values())
        self._queue.pop(0)
        self._post()

    @span(Track.COLLECTIVES, "exchange between nodes")
    def exchange(self, region: str) -> None:
        """Collective. In `region` of every group, the owners' slices come to each node, into the memory of one rank."""
        self._communicator.wait_all(self._sends)  # what comes may overwrite what goes
        self._sends = []
        requests: list[Request] = []
        for group in self._program.groups:
            tensor, slices = self._own.region(group, region), self._slices[group.name]
            for message in self._gather.sent:
                part = tensor[slice(*slices[message.owner])]
                if part.numel():
                    requests.append(self._communicator.isend(bytes_of(part), message.target, _GATHER_TAG))
            for message in self._gather.received:
                part = tensor[slice(*slices[message.owner])]
                if part.numel():
                    requests.append(self._communicator.irecv(bytes_of(part), message.source, _GATHER_TAG))
                    self._moved.network += part.nbytes
        self._communicator.wait_all(requests)

    def _post(self) -> None:
        """Expect the operands of the next group."""
        operands = self._operands[self._queue[0].name] if self._queue else {}
        self._receives = [
            self._communicator.irecv(bytes_of(operands[message.ranks[0]]), message.source, _REDUCE_TAG)
            for message in self._reduce.received
            if operands and operands[message.ranks[0]].numel()
        ]

    def _sum(self, group: ParameterGroup, start: int, stop: int) -> None:
        """The sum of a slice over this node, over this rank's own gradient: nobody else reads it there."""
        ranks = sorted(self._memories)
        position = {rank: index for index, rank in enumerate(ranks)}
        steps = [(position[into], position[source]) for into, source in inside(ranks)]
        if not steps:
            return
        gradients = [self._memories[rank].region(group, "gradient") for rank in ranks]
        add = TreeMean(steps, 1, gradients[0].dtype)
        own = gradients[position[self._rank]]
        add.of([gradient[start:stop] for gradient in gradients], own[start:stop])()
        self._moved.peer += (len(ranks) - 1) * own[start:stop].nbytes

    def _operand_buffer(self) -> Tensor:
        """The reduce operand buffer, as bytes; memory of this process where that is too small for what arrives."""
        needed = max((self._incoming_bytes(group) for group in self._program.groups), default=0)
        if not self.sources or not needed:
            return torch.empty(0, dtype=torch.uint8)
        buffer = self._own.reduce_buffer
        return buffer if buffer.numel() >= needed else torch.empty(needed, dtype=torch.uint8)

    def _incoming_bytes(self, group: ParameterGroup) -> int:
        start, stop = self._slices[group.name][self._rank]
        return (stop - start) * DTYPE_BYTES[group.dtype] * len(self.sources)

    def _place_operands(self, group: ParameterGroup) -> Mapping[int, Tensor]:
        start, stop = self._slices[group.name][self._rank]
        size = (stop - start) * DTYPE_BYTES[group.dtype]
        dtype: torch.dtype = getattr(torch, group.dtype)
        return {
            rank: self._buffer[index * size : (index + 1) * size].view(dtype) for index, rank in enumerate(self.sources)
        }
