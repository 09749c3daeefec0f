"""A job of one rank: every collective is a copy, and no MPI is needed."""

import os
import sys
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar, cast, final

import numpy as np

from sambasim.errors import InternalError
from sambasim.runtime.huge_pages import private_pages
from sambasim.runtime.ranks import (
    Buffer,
    ByteArray,
    Communicator,
    FailureNotice,
    Message,
    Messages,
    Range,
    Request,
    SharedWindow,
    as_bytes,
    check_counts,
    check_gather,
)

T = TypeVar("T")


def private_window(size_bytes: int) -> SharedWindow:
    """The window of a rank that is alone on its node. Its memory is freed with the last array on it."""
    return SharedWindow((np.frombuffer(private_pages(size_bytes), dtype=np.uint8, count=size_bytes),))


@dataclass(slots=True, eq=False)
class _Receive:
    buffer: ByteArray
    tag: int
    done: bool = False


@final
@dataclass(frozen=True, slots=True)
class SingleRank(Communicator):
    """The communicator of one rank. Messages to itself arrive in the order of sending, by tag."""

    library: str
    _mail: dict[int, deque[bytes]] = field(default_factory=dict)
    _notices: dict[int, FailureNotice] = field(default_factory=dict)

    def subset(self, ranks: Sequence[int]) -> "SingleRank":
        return self

    def barrier(self) -> None:
        """Nothing: there is no other rank."""

    def node_barrier(self) -> None:
        """Nothing: there is no other rank."""

    def broadcast_object(self, value: T | None, root: int = 0) -> T:
        return cast(T, value)

    def gather_object(self, value: T, root: int = 0) -> tuple[T, ...]:
        return (value,)

    def all_gather_object(self, value: T) -> tuple[T, ...]:
        return (value,)

    def all_to_all(
        self, send: Buffer, send_counts: Sequence[int], receive: Buffer, receive_counts: Sequence[int]
    ) -> None:
        source, target = as_bytes(send), as_bytes(receive)
        check_counts(source, send_counts, 1, "the buffer to send")
        check_counts(target, receive_counts, 1, "the buffer to receive")
        if len(source) != len(target):
            raise InternalError(f"rank 0 sends itself {len(source)} bytes and receives {len(target)}")
        target[:] = source

    def all_gather(self, send: Buffer, receive: Buffer, counts: Sequence[int]) -> None:
        source, target = as_bytes(send), as_bytes(receive)
        if not check_gather(source, target, counts, rank=0, world_size=1):
            target[:] = source

    def isend(self, buffer: Buffer, destination: int, tag: int) -> Request:
        self._mail.setdefault(tag, deque()).append(as_bytes(buffer).tobytes())
        return Request(None)

    def send_and_keep(self, buffer: Buffer, destination: int, tag: int) -> None:
        self.isend(buffer, destination, tag)

    def irecv(self, buffer: Buffer, source: int, tag: int) -> Request:
        return Request(_Receive(as_bytes(buffer), tag))

    def persistent(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Messages:
        if sends or receives:
            raise InternalError("a rank that is alone exchanges no gradients")
        return Messages(lambda: None, ())

    def wait_all(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if isinstance(request, _Receive) and not request.done:
                self._deliver(request)

    def test_all(self, requests: Sequence[Request]) -> bool:
        receives = [request for request in requests if isinstance(request, _Receive) and not request.done]
        wanted = Counter(receive.tag for receive in receives)
        if any(len(self._mail.get(tag, ())) < count for tag, count in wanted.items()):
            return False
        self.wait_all(requests)
        return True

    def allocate_shared(self, size_bytes: int, touched: Sequence[Range] | None = None) -> SharedWindow:
        return private_window(size_bytes)

    def announce_failure(self, notice: FailureNotice) -> None:
        self._notices[0] = notice

    def failures(self) -> Mapping[int, FailureNotice]:
        return dict(self._notices)

    @property
    def serves_threads(self) -> bool:
        return True

    def post(self, value: object, rank: int) -> None:
        raise InternalError(f"a message to rank {rank} of a job of one rank")

    def posted(self) -> Sequence[tuple[int, object]]:
        return []

    def abort(self, exit_code: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    def close(self) -> None:
        """Private windows are freed with their arrays."""

    def finish(self) -> None:
        """Nothing: there is no MPI, or it ends at exit."""

    def _deliver(self, receive: _Receive) -> None:
        message = np.frombuffer(self._mail[receive.tag].popleft(), dtype=np.uint8)
        receive.buffer[: len(message)] = message
        receive.done = True


def single_rank(host_name: str, library: str = "none") -> SingleRank:
    return SingleRank(rank=0, node_of=(0,), host_name=host_name, library=library)
