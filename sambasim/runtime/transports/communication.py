"""What every communication of a step is, and a group of ranks along a mesh axis, in which values travel."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, final

import torch
from torch import Tensor
from typing_extensions import TypeVar

from sambasim.collectives.tree import additions
from sambasim.errors import InternalError
from sambasim.ir.types import TensorType


@dataclass(slots=True)
class BytesMoved:
    """Bytes that communication moved, by kind, on this rank. Each transfer is counted once, where it arrives."""

    device_to_host: int = 0
    host_to_device: int = 0
    peer: int = 0
    network: int = 0

    def counts(self) -> tuple[int, int, int, int]:
        return self.device_to_host, self.host_to_device, self.peer, self.network


BYTE_COUNTS = ("device_to_host_bytes", "host_to_device_bytes", "peer_bytes", "network_bytes")
"""What traces call the counts of `BytesMoved`."""


R = TypeVar("R", default=object, covariant=True)


class Communication(ABC, Generic[R]):
    """One communication of a step: `begin` with this rank's operands, then `finish` once `is_ready`."""

    update_s = 0.0
    """Seconds of the last `finish` spent in a fused optimizer, which do not count as communication."""

    def begin(self, *operands: object) -> None:  # many need other ranks at once
        """Start with this rank's operands. Does not wait for ranks of this process."""

    def is_ready(self) -> bool:
        """Whether `finish` may be called. False only while other ranks of this process must run first."""
        return True

    @abstractmethod
    def finish(self) -> R:
        """The result, or None where it is in device memory. May wait for other processes."""


@final
class Finishing(Communication[R]):
    """All of it happens in `finish`."""

    def __init__(self, function: Callable[[], R]) -> None:
        self._function = function

    def finish(self) -> R:
        return self._function()


@final
class Sending(Communication[None]):
    """A tensor that leaves in `begin`."""

    def __init__(self, send: Callable[[Tensor], object]) -> None:
        self._send = send

    def begin(self, *operands: object) -> None:
        self._send(tensor_operand(operands))

    def finish(self) -> None:
        return None


@final
class Receiving(Communication[R]):
    """A value that another rank of this process may still have to send."""

    def __init__(self, is_there: Callable[[], bool], take: Callable[[], R]) -> None:
        self._is_there = is_there
        self._take = take

    def is_ready(self) -> bool:
        return self._is_there()

    def finish(self) -> R:
        return self._take()


class Overlapped(Communication):
    """A communication that overlaps with the last pass of a step and ends in `finish`."""

    @abstractmethod
    def begin_step(self) -> None:
        """A step begins: gradients are about to be overwritten."""

    @abstractmethod
    def section_done(self, count: int) -> None:
        """This rank has run `count` sections of the pass: gradients that are complete now may be sent or reduced."""

    @property
    @abstractmethod
    def hidden_s(self) -> float:
        """Seconds of communication during the pass, in this step."""


class Shared(NamedTuple):
    """What ranks exchange in a step: the losses of all replicas, in rank order, and the largest request of a rank."""

    losses: Sequence[float]
    request: int


EndOfStep: TypeAlias = Communication[Shared]
"""The communication that ends every step: all replicas see all updates, and all ranks receive what all have offered."""


Combine: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
"""Computes the result of a collective from the tensors of all ranks, in order."""


class AxisGroup(ABC):
    """Ranks of a job, usually a group along a mesh axis, seen from `rank`, the one at `position` of `size`. In a
    collective, every rank gets the tensors of all others and computes the result itself, for equal bits."""

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
    def recv(self, source: int, tag: int, type_: TensorType) -> Communication[Tensor]:
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
    raise InternalError(f"a communication takes one tensor, got {[type(operand).__name__ for operand in operands]}")
