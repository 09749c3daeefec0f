"""What ranks send besides gradients: a program's own values, losses and requests, and whole tensors to rank 0.

On one node, collectives of values go through shared memory, in which each rank has two boxes. It copies its tensor into
one of them, and goes on; every rank then reads all boxes. So the others need not take part, and a tensor is copied
once. Call k uses the box of call k - 2. All ranks have read that: a rank begins k when it has finished k - 1, for which
all others had begun k - 1, and so finished k - 2.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from sambasim.ir.dataflow import axis_of
from sambasim.ir.program import Member, Program
from sambasim.ir.types import ALIGNMENT_BYTES, Slice, TensorType, align
from sambasim.runtime.machine.communicator import Communicator, Request
from sambasim.runtime.transports.communication import AxisGroup, Combine, Communication, Shared, Simple
from sambasim.runtime.transports.shared_flags import Counter, NodeFlags
from sambasim.runtime.values.memory import byte_array
from sambasim.units import MIB

_COLLECT_TAG = 13
_GATHER_TAG = 31
_SEND_TAG = 1000  # messages of a program's own `send` nodes have this tag plus that of the node

_BOXES = 2

LARGEST_BYTES = 64 * MIB
"""Larger tensors are sent as messages, which need no shared memory of their size."""


@final
class MessageGroup(AxisGroup):
    """Ranks of different processes: tensors travel as messages, or through `boxes`."""

    boxes: "Boxes | None" = None

    def __init__(self, communicator: Communicator, ranks: Sequence[int] | None = None) -> None:
        super().__init__(range(communicator.world_size) if ranks is None else ranks, communicator.rank)
        self.communicator = communicator

    def gather(self, key: Hashable, combine: Combine) -> Communication:
        return _Gather(self, combine)

    def send(self, to: int, tag: int) -> Communication:
        return Simple(lambda: None, lambda *own: self._send(Communication.tensor(own), self.ranks[to], _SEND_TAG + tag))

    def recv(self, source: int, tag: int, type_: TensorType) -> Communication[Tensor]:
        return Simple(lambda: self._recv(self.ranks[source], _SEND_TAG + tag, type_))

    def _send(self, tensor: Tensor, rank: int, tag: int) -> None:
        """With its strides, on which the bits of an operator may depend."""
        message = torch.empty(_head_bytes(tensor.dim()) + tensor.nbytes, dtype=torch.uint8)
        strides = torch.empty_like(tensor, device="meta").stride()  # as a clone has them: without gaps
        message[: 8 * len(strides)].view(torch.int64).copy_(torch.tensor(strides, dtype=torch.int64))
        _body(message, tensor.dtype, tensor.shape, strides).copy_(tensor)
        self.communicator.send_and_keep(byte_array(message), rank, tag)

    def _recv(self, rank: int, tag: int, type_: TensorType) -> Tensor:
        dims = len(type_.shape)
        message = torch.empty(_head_bytes(dims) + type_.size_bytes, dtype=torch.uint8)
        self.communicator.wait_all([self.communicator.irecv(byte_array(message), rank, tag)])
        strides = message[: 8 * dims].view(torch.int64).tolist()
        return _body(message, getattr(torch, type_.dtype), type_.shape, strides)


def _head_bytes(dims: int) -> int:
    """The bytes of the strides, in whole cache lines, so that the tensor behind them is aligned as others are."""
    return align(8 * dims, 64)


def _body(message: Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    return message[_head_bytes(len(shape)) :].view(dtype).as_strided(shape, strides)


def box_bytes(program: Program, axis: str) -> int:
    """The size of the largest tensor that a rank gives to a collective along `axis` and that goes into a box."""
    along = [(graph, node) for graph in program.graphs for node in graph.nodes if axis_of(node) == axis]
    sizes = [graph.values[name].size_bytes for graph, node in along for name in node.reads if name in graph.values]
    return align(max((size for size in sizes if size <= LARGEST_BYTES), default=0), ALIGNMENT_BYTES)


class Boxes:
    """Those of the ranks of `communicator`, all of one node, of `size_bytes` each. Collective. Raises MachineError on
    all ranks of the job if a node lacks the memory."""

    def __init__(self, communicator: Communicator, size_bytes: int) -> None:
        self.size_bytes, self.position, self.calls = size_bytes, communicator.local_rank, 0
        self.flags = NodeFlags(communicator)
        parts = [torch.from_numpy(part) for part in communicator.allocate_shared(_BOXES * size_bytes).parts]
        self.of_call = [[part[box * size_bytes :] for part in parts] for box in range(_BOXES)]


@final
class _Gather(Communication):
    """Through the boxes of `group`, if it has some and the tensors fit into them; else by messages."""

    def __init__(self, group: MessageGroup, combine: Combine) -> None:
        self._group, self._combine = group, combine
        self._tensors: Sequence[Tensor] = ()
        self._requests: Sequence[Request] = ()
        self._call = 0  # its number among the collectives through boxes; 0 if it goes by messages

    def begin(self, *operands: object) -> None:
        own, group, boxes = self.tensor(operands), self._group, self._group.boxes
        if boxes is not None and own.nbytes <= boxes.size_bytes:
            self._call = boxes.calls = boxes.calls + 1
            of_call = boxes.of_call[self._call % _BOXES]
            self._tensors = [box[: own.nbytes].view(own.dtype).view(own.shape) for box in of_call]
            self._tensors[boxes.position].copy_(own)
            boxes.flags.publish(Counter.PROGRESS, self._call)
            return
        self._call, own = 0, own.resolve_conj().resolve_neg().contiguous()
        self._tensors = [own if at == group.position else torch.empty_like(own) for at in range(group.size)]
        irecv, isend = group.communicator.irecv, group.communicator.isend
        peers = [(at, rank) for at, rank in enumerate(group.ranks) if at != group.position]
        receives = [irecv(byte_array(self._tensors[at]), rank, _GATHER_TAG) for at, rank in peers]
        self._requests = [*receives, *(isend(byte_array(own), rank, _GATHER_TAG) for _, rank in peers)]

    def finish(self) -> object:
        if self._call and self._group.boxes is not None:
            self._group.boxes.flags.wait(Counter.PROGRESS, self._call)
        else:
            self._group.communicator.wait_all(self._requests)
        tensors, self._tensors = self._tensors, ()
        return self._combine(tensors)


def gather_losses(
    communicator: Communicator, workers: Collection[int], numbers: int
) -> Callable[[Sequence[float], int], Callable[[], Shared]]:
    """A collective that gathers the losses of all replicas, in rank order, each of `numbers`, and the largest request:
    it begins, and what it returns ends it. Only `workers` have a replica."""
    send, receive = np.zeros(1 + numbers), np.empty((communicator.world_size, 1 + numbers))
    sent, received, ranks = send.view(np.uint8), receive.reshape(-1).view(np.uint8), sorted(workers)

    def begin(losses: Sequence[float], request: int) -> Callable[[], Shared]:
        send[: 1 + len(losses)] = (request, *losses)
        wait = communicator.all_gather(sent, received)

        def finish() -> Shared:
            wait()
            rows: list[list[float]] = receive.tolist()
            return Shared([number for rank in ranks for number in rows[rank][1:]], int(max(row[0] for row in rows)))

        return finish

    return begin


def collect(
    communicator: Communicator, readable: Mapping[int, Tensor], slices: Sequence[Slice], member: Member
) -> Tensor | None:
    """Collective. On rank 0, the part of a group's flat tensor that belongs to `member`; None elsewhere. `readable`
    holds, by rank, the tensors that this process can read."""
    readable_by_root = communicator.broadcast_object(tuple(readable))
    rank, own, requests = communicator.rank, readable[communicator.rank], list[Request]()
    whole = torch.empty(member.numel, dtype=own.dtype) if rank == 0 else None
    for owner, (a, b) in enumerate(slices):
        start, stop = max(a, member.start), min(b, member.start + member.numel)
        if start >= stop:
            continue
        if whole is None:
            if owner == rank and owner not in readable_by_root:
                requests.append(communicator.isend(byte_array(own[start:stop]), 0, _COLLECT_TAG))
        elif owner in readable:
            whole[start - member.start : stop - member.start].copy_(readable[owner][start:stop])
        else:
            part = whole[start - member.start : stop - member.start]
            requests.append(communicator.irecv(byte_array(part), owner, _COLLECT_TAG))
    communicator.wait_all(requests)
    return whole
