"""Collectives of values among ranks of one node, through shared memory.

Each rank has two boxes. It copies its tensor into one of them, and goes on; every rank then reads all boxes. So the
others need not take part, and a tensor is copied once.

Call k uses the box of call k - 2. All ranks have read that: a rank begins k when it has finished k - 1, for which all
others had begun k - 1, and so finished k - 2.
"""

from collections.abc import Hashable, Sequence
from typing import final

import torch
from torch import Tensor

from sambasim.ir.dataflow import axis_of
from sambasim.ir.graph import Ref
from sambasim.ir.program import Program
from sambasim.ir.types import ALIGNMENT_BYTES, TensorType, align
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.transports.communication import AxisGroup, Combine, Communication, tensor_operand
from sambasim.runtime.transports.messages import MessageGroup
from sambasim.runtime.transports.shared_flags import Counter, NodeFlags
from sambasim.units import MIB

_BOXES = 2

LARGEST_BYTES = 64 * MIB
"""Larger tensors are sent as messages, which need no shared memory of their size."""


def box_bytes(program: Program, axis: str) -> int:
    """The size of the largest tensor that a rank gives to a collective along `axis` and that goes into a box."""
    sizes = [
        graph.values[operand.name].size_bytes
        for graph in program.graphs
        for node in graph.nodes
        if axis_of(node) == axis
        for operand in node.args
        if isinstance(operand, Ref) and operand.name in graph.values
    ]
    return align(max((size for size in sizes if size <= LARGEST_BYTES), default=0), ALIGNMENT_BYTES)


@final
class MailboxGroup(AxisGroup):
    """`ranks` of `job`, all of one node. Collective over the job. `size_bytes`: of a box. Raises MachineError on all
    ranks of the job if a node lacks the memory."""

    def __init__(self, job: Communicator, ranks: Sequence[int], size_bytes: int) -> None:
        super().__init__(ranks, job.rank)
        own = job.subset(ranks)
        self.messages = MessageGroup(job, ranks)
        self.size_bytes = size_bytes
        self.flags = NodeFlags(own)
        window = own.allocate_shared(_BOXES * size_bytes)
        parts = [torch.from_numpy(window.of(position)) for position in range(self.size)]
        self.boxes = [[part[box * size_bytes :] for part in parts] for box in range(_BOXES)]
        self.calls = 0

    def gather(self, key: Hashable, combine: Combine) -> Communication:
        return _Gather(self, self.messages.gather(key, combine), combine)

    def send(self, to: int, tag: int) -> Communication:
        return self.messages.send(to, tag)

    def recv(self, source: int, tag: int, type_: TensorType) -> Communication[Tensor]:
        return self.messages.recv(source, tag, type_)


@final
class _Gather(Communication):
    def __init__(self, group: MailboxGroup, by_messages: Communication, combine: Combine) -> None:
        self._group = group
        self._by_messages = by_messages
        self._combine = combine
        self._call = 0
        """Its number among the collectives of the group; 0 if it goes by messages."""
        self._tensors: Sequence[Tensor] = ()

    def begin(self, *operands: object) -> None:
        group, own = self._group, tensor_operand(operands)
        if own.nbytes > group.size_bytes:
            self._call = 0
            self._by_messages.begin(own)
            return
        group.calls += 1
        self._call = group.calls
        boxes = group.boxes[self._call % _BOXES]
        self._tensors = [box[: own.nbytes].view(own.dtype).view(own.shape) for box in boxes]
        self._tensors[group.position].copy_(own)
        group.flags.publish(Counter.PROGRESS, self._call)

    def finish(self) -> object:
        if not self._call:
            return self._by_messages.finish()
        self._group.flags.wait(Counter.PROGRESS, self._call)
        return self._combine(self._tensors)
