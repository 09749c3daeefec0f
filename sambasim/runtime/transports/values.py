"""Messages besides gradients: a program's own values, losses and requests, and whole tensors to rank 0.

Each rank sends its tensor to all others and computes the result itself, in the order of the tree, for equal bits.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from sambasim.collectives.tree import additions
from sambasim.errors import InternalError
from sambasim.ir.program import Member
from sambasim.ir.types import Slice, TensorType, align
from sambasim.runtime.machine.communicator import Communicator, Request
from sambasim.runtime.transports.base import Communication, Shared
from sambasim.runtime.values.device import bytes_of

Combine: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
"""Computes the result of a collective from the tensors of all ranks, in order."""

_COLLECT_TAG = 13
_GATHER_TAG = 31
_SEND_TAG = 1000
"""Messages of a program's own `send` nodes have this tag plus that of the node."""


class Line(ABC):
    """Ranks of a job, usually a group along a mesh axis, seen from `rank`, the one at `position` of `size`."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.position = self.ranks.index(rank)

    @abstractmethod
    def gather(self, key: Hashable, combine: Combine) -> Communication:
        """A collective over tensors of one type; `key` identifies it within the program."""

    @abstractmethod
    def send(self, to: int, tag: int) -> Communication:
        """Send a tensor to the rank at position `to`."""

    @abstractmethod
    def recv(self, source: int, tag: int, type_: TensorType) -> Communication:
        """Receive a tensor of `type_` from the rank at position `source`."""


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """The sum, in the order of the tree."""
    terms = list(tensors)
    for into, source in additions(len(terms)):
        terms[into] = terms[into] + terms[source]
    return terms[0] if len(terms) > 1 else terms[0].clone()


def mean_of(tensors: Sequence[Tensor]) -> Tensor:
    return sum_of(tensors).div_(len(tensors))


def max_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).amax(0)


def of_root(root: int) -> Combine:
    return lambda tensors: tensors[root].clone()


def tensor_operand(operands: Sequence[object]) -> Tensor:
    """The one operand of a communication of values. Raises InternalError if it is no tensor."""
    if len(operands) == 1 and isinstance(operands[0], Tensor):
        return operands[0]
    raise InternalError(f"a communication takes one tensor, got {[type(one).__name__ for one in operands]}")


@final
class MessageLine(Line):
    """Ranks of different processes: tensors travel as messages."""

    def __init__(self, communicator: Communicator, ranks: Sequence[int]) -> None:
        super().__init__(ranks, communicator.rank)
        self.communicator = communicator

    def gather(self, key: Hashable, combine: Combine) -> Communication:
        return _GatherMessages(self, combine)

    def send(self, to: int, tag: int) -> Communication:
        return _Send(self.communicator, self.ranks[to], _SEND_TAG + tag)

    def recv(self, source: int, tag: int, type_: TensorType) -> Communication:
        return _Recv(self.communicator, self.ranks[source], _SEND_TAG + tag, type_)


class _GatherMessages(Communication):
    def __init__(self, line: MessageLine, combine: Combine) -> None:
        self._line = line
        self._combine = combine
        self._tensors: list[Tensor] = []
        self._requests: list[Request] = []

    def begin(self, *operands: object) -> None:
        own, line = tensor_operand(operands).resolve_conj().resolve_neg().contiguous(), self._line
        self._tensors = [own if one == line.position else torch.empty_like(own) for one in range(line.size)]
        communicator = line.communicator
        peers = [(one, rank) for one, rank in enumerate(line.ranks) if one != line.position]
        receives = [communicator.irecv(bytes_of(self._tensors[one]), rank, _GATHER_TAG) for one, rank in peers]
        sends = [communicator.isend(bytes_of(own), rank, _GATHER_TAG) for _, rank in peers]
        self._requests = receives + sends

    def finish(self) -> object:
        self._line.communicator.wait_all(self._requests)
        tensors, self._tensors = self._tensors, []
        return self._combine(tensors)


class _Send(Communication):
    """Sends a tensor with its strides, on which the bits of an operator may depend."""

    def __init__(self, communicator: Communicator, rank: int, tag: int) -> None:
        self._communicator = communicator
        self._rank = rank
        self._tag = tag

    def begin(self, *operands: object) -> None:
        tensor = tensor_operand(operands)
        message = torch.empty(_head_bytes(tensor.dim()) + tensor.nbytes, dtype=torch.uint8)
        strides = torch.empty_like(tensor, device="meta").stride()  # as a clone has them: without gaps
        message[: 8 * len(strides)].view(torch.int64).copy_(torch.tensor(strides, dtype=torch.int64))
        _body(message, tensor.dtype, tensor.shape, strides).copy_(tensor)
        self._communicator.send_and_keep(bytes_of(message), self._rank, self._tag)

    def finish(self) -> object:
        return None


@final
class _Recv(Communication):
    def __init__(self, communicator: Communicator, rank: int, tag: int, type_: TensorType) -> None:
        self._communicator = communicator
        self._rank = rank
        self._tag = tag
        self._type = type_

    def finish(self) -> Tensor:
        type_ = self._type
        dims = len(type_.shape)
        message = torch.empty(_head_bytes(dims) + type_.size_bytes, dtype=torch.uint8)
        self._communicator.wait_all([self._communicator.irecv(bytes_of(message), self._rank, self._tag)])
        strides = message[: 8 * dims].view(torch.int64).tolist()
        return _body(message, getattr(torch, type_.dtype), type_.shape, strides)


def _head_bytes(dims: int) -> int:
    """The bytes of the strides, in whole cache lines, so that the tensor behind them is aligned as others are."""
    return align(8 * dims, 64)


def _body(message: Tensor, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    return message[_head_bytes(len(shape)) :].view(dtype).as_strided(shape, strides)


@final
class GatherLosses:
    """Gathers the losses of all replicas, in rank order, and the largest request. Only `workers` have a replica."""

    def __init__(self, communicator: Communicator, workers: Collection[int]) -> None:
        self._communicator = communicator
        self._workers = sorted(workers)
        self._send = np.zeros(2)
        self._receive = np.empty((communicator.world_size, 2))
        self._bytes = self._send.view(np.uint8), self._receive.reshape(-1).view(np.uint8)

    def __call__(self, losses: Sequence[float], request: int) -> Shared:
        """Collective."""
        self._send[: 1 + len(losses)] = (request, *losses)
        self._communicator.all_gather(*self._bytes)
        received: list[list[float]] = self._receive.tolist()
        return Shared([received[rank][1] for rank in self._workers], int(max(row[0] for row in received)))


def collect(
    communicator: Communicator, readable: Mapping[int, Tensor], slices: Sequence[Slice], member: Member
) -> Tensor | None:
    """Collective. On rank 0, the part of a group's flat tensor that belongs to `member`; None elsewhere. `readable`
    holds, by rank, the tensors that this process can read."""
    rank = communicator.rank
    parts = [
        (owner, max(start, member.start), min(stop, member.start + member.numel))
        for owner, (start, stop) in enumerate(slices)
    ]
    parts = [(owner, start, stop) for owner, start, stop in parts if start < stop]
    readable_by_root = communicator.broadcast_object(tuple(readable))
    own = readable[rank]
    if rank != 0:
        sends = [
            communicator.isend(bytes_of(own[start:stop]), 0, _COLLECT_TAG)
            for owner, start, stop in parts
            if owner == rank and owner not in readable_by_root
        ]
        communicator.wait_all(sends)
        return None
    whole = torch.empty(member.numel, dtype=own.dtype)
    requests = []
    for owner, start, stop in parts:
        part = whole[start - member.start : stop - member.start]
        if owner in readable:
            part.copy_(readable[owner][start:stop])
        else:
            requests.append(communicator.irecv(bytes_of(part), owner, _COLLECT_TAG))
    communicator.wait_all(requests)
    return whole
