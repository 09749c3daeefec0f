"""Messages of device sync between nodes, from device memory to device memory: those that `collectives` lists.

They travel while the rank computes: gradients of a group once its node has completed them, and its parameters as soon
as they are updated. First go those of the earlier step, then gradients, then parameters as the next pass reads them.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from sambasim.collectives import all_gather_messages, blocks, port_of, reduce_scatter_messages
from sambasim.ir.dataflow import readiness
from sambasim.ir.program import ParameterGroup
from sambasim.ir.types import pieces
from sambasim.records.metrics import BytesMoved
from sambasim.records.trace import Track
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.node_memory import ByteArray
from sambasim.runtime.machine.process import check_node_memory
from sambasim.runtime.transports.communication import Slices
from sambasim.runtime.transports.links import Links
from sambasim.runtime.values.mean import CHUNK_ELEMENTS, Wire, sent_as, tree_mean
from sambasim.runtime.values.memory import DeviceMemory, byte_array
from sambasim.runtime.watch.observer import span


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
    group, what each rank updates; `moved` counts the bytes; `wire`: see `tree_mean`. Of group g, message 2 g is a
    gradient, 2 g + 1 parameters. Collective. Raises MachineError if hosts cannot connect."""

    def __init__(
        self,
        communicator: Communicator,
        memories: Mapping[int, DeviceMemory],
        slices: Slices,
        moved: BytesMoved,
        wire: Wire,
    ) -> None:
        self._communicator, self._memories, self._slices, self._moved = communicator, memories, slices, moved
        self._wire = wire
        rank, node_of = communicator.rank, communicator.node_of
        self._own, self._groups = memories[rank], memories[rank].program.groups
        self._number = {group.name: number for number, group in enumerate(self._groups)}
        self._reduce, self._gather = reduce_scatter_messages(node_of, rank), all_gather_messages(node_of, rank)
        self.sources = tuple(message.ranks[0] for message in self._reduce.received)
        """The ranks of other nodes that send operands to this rank; the lowest rank stands for a node's sum."""
        lengths = {name: of_ranks[rank][1] - of_ranks[rank][0] for name, of_ranks in slices.items()}
        dtypes = {group.name: sent_as(group, wire) for group in self._groups}
        sizes = {name: lengths[name] * dtype.itemsize for name, dtype in dtypes.items()}
        self.incoming_bytes = {name: size * len(self.sources) for name, size in sizes.items()}
        """By group, the bytes of gradients that this rank receives."""
        if self.sources:
            check_node_memory(communicator, sum(self.incoming_bytes.values()), "the gradients from other nodes")
        self.operands: dict[str, Mapping[int, Tensor]] = {}
        """By group, the buffers for the operands of this rank's slice, by rank of `sources`."""
        self.ready = readiness(self._own.program, by_node=True)
        end = max((at.reduce for at in self.ready.values()), default=0)
        self.first_reader = {name: next((at for at in of.readers if at < end), 0) for name, of in self.ready.items()}
        """By group, the first node of a pass that reads its parameters; 0 for those that none reads."""
        self._places: dict[tuple[int, int], ByteArray] = {}  # of messages, by sender and number
        for group in self._groups:
            size, dtype, number = sizes[group.name], dtypes[group.name], self._number[group.name]
            self.operands[group.name] = {of: torch.empty(lengths[group.name], dtype=dtype) for of in self.sources}
            for message in self._reduce.received if size else ():
                self._places[message.source, 2 * number] = byte_array(self.operands[group.name][message.ranks[0]])
            parameter = self._own.region(group, "parameter")
            for message in self._gather.received:
                part = parameter[slice(*slices[group.name][message.owner])]
                if part.numel():
                    self._places[message.source, 2 * number + 1] = byte_array(part)
        self._expected = Counter(number for _, number in self._places)  # messages of a step, by number
        self._bytes: Counter[int] = Counter()
        for (_, number), place in self._places.items():
            self._bytes[number] += place.nbytes
        self._asked: Counter[int] = Counter()  # steps that they were expected in
        self._came: Counter[int] = Counter()
        self._step = 0  # begun so far: messages of a step are not overtaken by those of the next one
        received = (message.source for message in (*self._reduce.received, *self._gather.received))
        if self.sources:
            # Those of empty slices too: both ends of a connection must know of it.
            peers = {message.target for message in (*self._reduce.sent, *self._gather.sent)}.union(received)
            self._links = Links(communicator, sorted(peers), self._places, self._arrived)
            communicator.at_close(self._links.close)

    def begin_step(self, groups: Collection[ParameterGroup]) -> None:
        """Gradients of `groups` will come."""
        self._step += 1
        self._asked.update(2 * self._number[group.name] for group in groups)

    def _arrived(self, number: int) -> None:
        self._came[number] += 1

    @span(Track.COLLECTIVES, "send to other nodes")
    def send(self, group: ParameterGroup) -> None:
        """Begin to send `group` to other nodes. All ranks of this node must have completed it."""
        gradient, number = self._own.region(group, "gradient"), 2 * self._number[group.name]
        for message in self._reduce.sent:
            start, stop = self._slices[group.name][message.owner]
            if start < stop:
                if len(message.ranks) > 1:
                    self._sum(group, start, stop)
                part = narrowed(gradient[start:stop], sent_as(group, self._wire))
                self._links.send(message.target, number, byte_array(part), (self._step, 0))

    def holder(self, owner: int) -> int:
        """The rank of this node that receives the slices of `owner`."""
        if owner in self._memories:
            return owner
        return port_of(blocks(self._communicator.node_of), owner, self._communicator.node_index)

    def has_received(self, group: ParameterGroup) -> bool:
        """Whether all operands of `group` have arrived."""
        return self._has(2 * self._number[group.name])

    @span(Track.COLLECTIVES, "wait for other nodes")
    def receive_one(self, groups: Sequence[ParameterGroup]) -> None:
        """Wait until all operands of one of `groups` have arrived."""
        self._links.wait_for(lambda: any(map(self.has_received, groups)))

    def reduced(self, group: ParameterGroup) -> None:
        self._moved.network += self._bytes[2 * self._number[group.name]]

    def gather(self, group: ParameterGroup) -> None:
        """Begin to send the updated slice of `group` to one rank of each other node. No rank of the job reads the
        parameters before they are updated."""
        number, parameter = 2 * self._number[group.name] + 1, self._own.region(group, "parameter")
        part = parameter[slice(*self._slices[group.name][self._communicator.rank])]
        for message in self._gather.sent if part.numel() else ():
            self._links.send(message.target, number, byte_array(part), (self._step, 1, self.first_reader[group.name]))
        self._asked[number] += 1
        self._moved.network += self._bytes[number]

    @span(Track.COLLECTIVES, "wait for parameters of other nodes", detailed=False)
    def wait_for(self, groups: Collection[ParameterGroup]) -> None:
        """Until the parameters of `groups` have arrived that the last step has updated."""
        self._links.wait_for(lambda: all(self._has(2 * self._number[group.name] + 1) for group in groups))

    def _has(self, number: int) -> bool:
        return self._came[number] >= self._asked[number] * self._expected[number]

    def _sum(self, group: ParameterGroup, start: int, stop: int) -> None:
        """Sum a slice over this node, in place of this rank's own gradient, which no other rank reads."""
        parts = {rank: memory.region(group, "gradient")[start:stop] for rank, memory in sorted(self._memories.items())}
        own = parts[self._communicator.rank]
        tree_mean([*parts.values()], own, 1, wire=self._wire)()
        self._moved.peer += (len(parts) - 1) * own.nbytes


def narrowed(part: Tensor, dtype: torch.dtype) -> Tensor:
    """`part`, rounded to `dtype`, in the first bytes of its own memory."""
    if part.dtype is dtype:
        return part
    place = part.view(dtype)[: part.numel()]
    for start, stop in pieces(0, part.numel(), CHUNK_ELEMENTS):
        place[start:stop] = part[start:stop].to(dtype)  # in memory of its own before it overwrites what has been read
    return place
