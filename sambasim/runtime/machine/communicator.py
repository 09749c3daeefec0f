"""The interface by which the ranks of a job communicate, and the buffers that they send.

A node is a set of ranks that can share memory, numbered by their lowest rank; a local rank is a position in it.
All ranks must call a *collective* method, in the same order. Buffers are contiguous bytes with one axis. There is no
reduction: the owner of a slice adds gradients, in an order that does not depend on the MPI.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NewType, NoReturn, TypeAlias, TypeVar, cast

from sambasim.errors import InternalError, SambasimError
from sambasim.runtime.machine.node_memory import ByteArray, Range, private_storage

T = TypeVar("T")

Request = NewType("Request", object)
"""A message under way. Only `wait_all` and `test_all` of the communicator that began it can read one."""
Message: TypeAlias = tuple[ByteArray, int]  # and the rank that it goes to or comes from


NOTICE, QUESTION, NOTHING = 1, 2, 3  # tags of what is posted: by a rank that fails, by watchdogs, and never


class Messages(NamedTuple):
    """Messages between the same buffers and ranks again and again: `start`, then `wait_all` of `requests`."""

    start: Callable[[], object]
    requests: Sequence[Request]


class FailureNotice(NamedTuple):
    """A failing rank's message to the others. `secondary`: another rank caused the error."""

    words: str
    exit_code: int
    secondary: bool


class SharedWindow(NamedTuple):
    """Memory of a node: one part for each rank, zeros at first, and all ranks may access all parts. `sync` is a memory
    fence. Writer: write, `sync`, `node_barrier`. Reader: `node_barrier`, `sync`, read."""

    parts: tuple[ByteArray, ...]
    sync: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Communicator:
    """One rank's view of the job; this one is of a job of one rank, and `mpi.py` has that of several. `node_of[r]`: the
    node of world rank r; `library`: name and version of the MPI in use, such as `MPICH 5.0.2`."""

    rank: int
    node_of: tuple[int, ...]
    host_name: str
    library: str = "none"

    @property
    def world_size(self) -> int:
        return len(self.node_of)

    @property
    def node_index(self) -> int:
        return self.node_of[self.rank]

    @cached_property
    def node_count(self) -> int:
        return len(set(self.node_of))

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, node in enumerate(self.node_of) if node == self.node_index)

    @cached_property
    def local_rank(self) -> int:
        return self.local_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        return len(self.local_ranks)

    @property
    def job(self) -> "Communicator":
        """That of all ranks, from which this one is a subset."""
        return self

    def subset(self, ranks: Sequence[int]) -> "Communicator":
        """Collective over `ranks`, ascending, with this one: their own communicator, without notices and posts."""
        return self

    def barrier(self) -> None:
        """Collective: return when every rank has called it."""

    def node_barrier(self) -> None:
        """Collective over the node: return when every rank of this node has called it."""

    def broadcast_object(self, value: T | None) -> T:
        """Collective: the value of rank 0 (any picklable object). The values of other ranks are ignored."""
        return cast(T, value)

    def gather_object(self, value: T) -> tuple[T, ...] | None:
        """Collective: on rank 0, the values of all ranks in rank order; None elsewhere."""
        return (value,)

    def all_gather_object(self, value: T) -> tuple[T, ...]:
        """Collective: the values of all ranks in rank order, on every rank."""
        return (value,)

    @contextmanager
    def alike(self) -> Iterator[None]:
        """Collective: what a rank raises within the block, where nothing is collective, is raised on every rank; of
        several, that of the lowest rank. Errors that are not sambasim's are RuntimeErrors there."""
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        is_ours = own is None or isinstance(own, SambasimError)
        told = own if is_ours else RuntimeError(f"on rank {self.rank}: {type(own).__name__}: {own}")
        for rank, raised in enumerate(self.all_gather_object(told)):
            if raised is not None:
                raise own if own is not None and rank == self.rank else raised

    def from_first(self, work: Callable[[], T]) -> T:
        """Collective: what `work` returns, or raises, on rank 0."""
        value = None
        with self.alike():
            if self.rank == 0:
                value = work()
        return self.broadcast_object(value)

    def all_gather(self, send: ByteArray, receive: ByteArray) -> Callable[[], object]:
        """Collective: after a call of what it returns, `receive` is the `send` of every rank, in rank order; all have
        one length."""
        receive[:] = send
        return lambda: None

    def isend(self, buffer: ByteArray, destination: int, tag: int) -> Request:
        """Begin to send. The buffer must stay alive and unchanged until `wait_all` or `test_all` reports completion."""
        raise InternalError(f"a message to rank {destination} of a job of one rank")

    def send_and_keep(self, buffer: ByteArray, destination: int, tag: int) -> None:
        """Begin to send. Keeps the buffer, which nobody may change any more, until the message has left."""
        self.isend(buffer, destination, tag)

    def irecv(self, buffer: ByteArray, source: int, tag: int) -> Request:
        """Begin to receive a message of at most `len(buffer)` bytes."""
        raise InternalError(f"a message from rank {source} of a job of one rank")

    def persistent(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Messages:
        """Messages that `isend` or `irecv` would begin, made once for many steps."""
        return Messages(lambda: None, ())

    def wait_all(self, requests: Sequence[Request]) -> None:
        """Wait until all of these messages have been sent or received."""

    def test_all(self, requests: Sequence[Request]) -> bool:
        """Whether all of these messages have been sent or received. Does not wait; may be called again."""
        return True

    def allocate_shared(self, size_bytes: int, touched: Sequence[Range] | None = None) -> SharedWindow:
        """Collective over the job, also on a subset: all ranks allocate at the same time, each on a subset of its own.
        Returns a window with `size_bytes` of this rank, until `close`. Sizes may differ. Raises MachineError on every
        rank if a node lacks the shared memory. `touched`: the byte ranges that need memory; all by default."""
        return SharedWindow((private_storage(size_bytes, touched),))

    @property
    def serves_threads(self) -> bool:
        """Whether several threads may use it at the same time."""
        return True

    def post(self, value: object, rank: int, tag: int) -> None:
        """Send `value` (any small picklable object) to another rank. Does not wait, and needs no action by it. Only one
        thread uses a `tag`."""
        raise InternalError(f"a message to rank {rank} of a job of one rank")

    def posted(self, tag: int) -> "Sequence[tuple[int, Any]]":
        """The values posted to this rank since the last call, each after its sender. Does not wait."""
        return []

    def abort(self, exit_code: int) -> NoReturn:
        """End every process of the job now."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    def at_close(self, action: Callable[[], object]) -> None:
        """Have `close` call `action`."""

    def close(self) -> None:
        """Collective: free the windows and their arrays. Called at exit if not before."""

    def finish(self) -> None:
        """Collective: end MPI. At exit it ends by itself."""


def single_rank(host_name: str, library: str = "none") -> Communicator:
    return Communicator(rank=0, node_of=(0,), host_name=host_name, library=library)
