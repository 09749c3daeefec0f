"""The only file that uses MPI. Functions import mpi4py, because it loads the MPI library, which some machines lack."""

import atexit
import mmap
import os
import socket
import sys
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast, final

import numpy as np
from numpy.typing import NDArray

from sambasim.errors import InternalError, LaunchError
from sambasim.forks import ends_with
from sambasim.ir.types import align
from sambasim.runtime.machine import node_memory
from sambasim.runtime.machine.communicator import Communicator, Message, Messages, Request, SharedWindow, single_rank
from sambasim.runtime.machine.launcher import check_alone, check_launcher, find_launcher, library_name, ranks_of_node
from sambasim.runtime.machine.node_memory import ByteArray, Range, collapse, merged, second_mapping

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_FIRST_TAG = 2


def connect(command: Sequence[str], environ: Mapping[str, str] = os.environ) -> Communicator:
    """Collective. Start MPI and connect the ranks of this job. Raises LaunchError if the launcher does not fit the MPI,
    MachineError if MPI lacks shared memory. `command`: what was typed, for remedies."""
    names_before, launcher = node_memory.mapped_names(), find_launcher(environ)
    check_alone(environ, command)
    try:
        version = _load_library()
    except LaunchError:
        if launcher is not None and launcher.world_size > 1:
            raise
        return single_rank(socket.gethostname())
    from mpi4py import MPI

    host, library, executable = socket.gethostname(), library_name(version), Path(sys.executable)
    check_launcher(environ, None, version, command=command, executable=executable)
    if launcher is not None and launcher.is_open_mpi:
        ends_with(os.getppid())  # ranks would outlive mpirun
    node_memory.check_start(ranks_of_node(environ), host, node_memory.free_bytes())
    if not MPI.Is_initialized():
        # Windows are within a node; Open MPI's component for others prints a warning.
        os.environ.setdefault("OMPI_MCA_osc", "^ucx")
        # UCX remembers every region that is unmapped, such as each batch of a data worker, until it registers another,
        # which over TCP it never does.
        os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "64k")
        with warnings.catch_warnings():
            # of a launcher of another MPI: check_launcher raises an error for it
            warnings.filterwarnings("ignore", message="suspicious MPI execution environment")
            MPI.Init_thread()
    world = MPI.COMM_WORLD
    node = cast("MPI.Intracomm", world.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank))
    _exchange_first_messages(node)
    node_memory.unlink(node_memory.mapped_names() - names_before)
    check_launcher(environ, world.size, version, command=command, executable=executable)
    if world.size == 1:
        return single_rank(host, library)
    first_rank_of_node = world.allgather(node.bcast(world.rank))
    nodes = sorted(set(first_rank_of_node))
    node_of = tuple(nodes.index(first) for first in first_rank_of_node)
    communicator = MpiCommunicator(
        world.rank, node_of, host, library, _mpi=MPI, _world=world, _node=node, _notices=world.Dup()
    )
    atexit.register(communicator.close)
    return communicator


def has_ended() -> bool:
    """Whether this process has ended MPI."""
    return "mpi4py.MPI" in sys.modules and bool(sys.modules["mpi4py.MPI"].Is_finalized())


def linked_library() -> str:
    """Name and version of the MPI that mpi4py is linked to, not started. Raises LaunchError if there is none."""
    return library_name(_load_library())


@final
@dataclass(frozen=True)
class MpiCommunicator(Communicator):
    _mpi: Any = field(kw_only=True)  # the module mpi4py.MPI
    _world: "MPI.Intracomm" = field(kw_only=True)
    _node: "MPI.Intracomm" = field(kw_only=True)
    _notices: "MPI.Intracomm" = field(kw_only=True)  # its messages do not mix with those of training
    _held: ExitStack = field(default_factory=ExitStack, init=False)  # what `close` frees, the last first
    _posted: "defaultdict[int, deque[MPI.Request]]" = field(default_factory=lambda: defaultdict(deque), init=False)
    _sending: "deque[MPI.Request]" = field(default_factory=deque, init=False)
    _promised: node_memory.Promised = field(default_factory=node_memory.Promised)
    _job: "MpiCommunicator | None" = None

    @property
    def job(self) -> "MpiCommunicator":
        return self._job or self

    def subset(self, ranks: Sequence[int]) -> Communicator:
        if len(ranks) == 1:
            return single_rank(self.host_name, self.library)
        world = self._world.Create_group(self._world.group.Incl(list(ranks)))
        node = cast("MPI.Intracomm", world.Split(self.node_index, key=world.rank))
        nodes = sorted({self.node_of[rank] for rank in ranks}, key=[self.node_of[rank] for rank in ranks].index)
        node_of = tuple(nodes.index(self.node_of[rank]) for rank in ranks)
        subset = replace(
            self, rank=world.rank, node_of=node_of, _world=world, _node=node, _notices=world, _job=self.job
        )
        self._held.callback(subset.close)
        return subset

    def barrier(self) -> None:
        self._world.Barrier()

    def node_barrier(self) -> None:
        self._node.Barrier()

    def broadcast_object(self, value: T | None) -> T:
        return cast(T, self._world.bcast(value))

    def gather_object(self, value: T) -> tuple[T, ...] | None:
        gathered = self._world.gather(value)
        return None if gathered is None else tuple(gathered)

    def all_gather_object(self, value: T) -> tuple[T, ...]:
        return tuple(self._world.allgather(value))

    def all_gather(self, send: ByteArray, receive: ByteArray) -> Callable[[], object]:
        return self._world.Iallgather(send, receive).Wait

    def isend(self, buffer: ByteArray, destination: int, tag: int) -> Request:
        return Request(self._world.Isend(buffer, dest=destination, tag=tag))

    def send_and_keep(self, buffer: ByteArray, destination: int, tag: int) -> None:
        _keep(self._sending, self._world.Isend(buffer, dest=destination, tag=tag))

    def irecv(self, buffer: ByteArray, source: int, tag: int) -> Request:
        return Request(self._world.Irecv(buffer, source=source, tag=tag))

    def persistent(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Messages:
        requests = [self._world.Send_init(buffer, dest=rank, tag=tag) for buffer, rank in sends]
        requests += [self._world.Recv_init(buffer, source=rank, tag=tag) for buffer, rank in receives]
        for request in requests:
            self._held.callback(request.Free)  # MPICH warns of those that are left
        return Messages(partial(self._mpi.Prequest.Startall, requests), [Request(request) for request in requests])

    def wait_all(self, requests: Sequence[Request]) -> None:
        self._mpi.Request.Waitall(list(requests))

    def test_all(self, requests: Sequence[Request]) -> bool:
        return bool(self._mpi.Request.Testall(list(requests)))

    def allocate_shared(self, size_bytes: int, touched: Sequence[Range] | None = None) -> SharedWindow:
        page = mmap.PAGESIZE  # each part starts on one, so that its pages are in the memory node of their rank
        whole = align(max(size_bytes, 1), page)
        used = [(0, size_bytes)] if touched is None else merged(touched)
        pages = merged((start // page * page, align(stop, page)) for start, stop in used if start < stop)
        needed = min(max(sum(stop - start for start, stop in pages), page), whole)
        if self.library.startswith("Open MPI"):
            # It makes no window that is larger than what is free, less a twentieth, however little will be touched.
            needed = whole + whole // 16
        shared, promised = self.local_size > 1, self._promised
        # Other subsets of the job allocate at the same time, and earlier windows have pages that nobody has touched.
        if not promised.bytes:
            promised.free_before = node_memory.free_bytes()
        needed_bytes = promised.bytes + (needed if shared else 0)
        demanded_bytes = needed_bytes + (node_memory.MPI_RESERVE_BYTES if shared else 0)
        demand = node_memory.Demand(self.job.node_index, self.host_name, demanded_bytes, promised.free_before)
        node_memory.check_demands(self.job.all_gather_object(demand))
        # Without the memory, MPIs raise an error, wait forever, or die at the first access. So every rank tries.
        node_bytes, own = sum(self._node.allgather(whole)), None
        with self.job.alike():
            if shared:
                node_memory.try_mapping(node_bytes, self.host_name, self.job.rank)
            else:
                own = Communicator.allocate_shared(self, size_bytes, touched)
        promised.bytes = needed_bytes
        if own is not None:
            return own
        names_before = node_memory.mapped_names()
        try:
            handle = self._mpi.Win.Allocate_shared(whole, disp_unit=1, comm=self._node)
        except self._mpi.Exception as error:
            reason = (str(error).splitlines() or ["it does not say why"])[0]
            raise node_memory.window_error(node_bytes, self.host_name, reason) from error
        self._held.callback(handle.Free)
        sizes = self._node.allgather(size_bytes)
        parts = []
        for local_rank, size in enumerate(sizes):
            memory, _ = handle.Shared_query(local_rank)
            parts.append(part := np.frombuffer(cast(memoryview, memory), dtype=np.uint8, count=size))
            if part.ctypes.data % page:
                raise InternalError(f"the part of local rank {local_rank} in a shared window does not start on a page")
            if (mapping := second_mapping(part)) is not None:
                parts[local_rank], unmap = mapping
                self._held.callback(unmap)
                if local_rank == self.local_rank and touched is None:
                    collapse(parts[local_rank], used)
        # Passive access to all parts, until `close`; `Sync` needs it.
        handle.Lock_all(self._mpi.MODE_NOCHECK)
        self._held.callback(handle.Unlock_all)
        if touched is None:
            parts[self.local_rank][:] = 0  # the first access puts pages into the memory node of their owner
        handle.Sync()
        self.node_barrier()
        node_memory.unlink(node_memory.mapped_names() - names_before)
        return SharedWindow(tuple(parts), handle.Sync)

    @property
    def serves_threads(self) -> bool:
        return bool(self._mpi.Query_thread() == self._mpi.THREAD_MULTIPLE)

    def post(self, value: object, rank: int, tag: int) -> None:
        _keep(self._posted[tag], self._notices.isend(value, dest=rank, tag=tag))

    def posted(self, tag: int) -> "Sequence[tuple[int, Any]]":
        received = []
        while (message := self._notices.improbe(tag=tag)) is not None:
            status = self._mpi.Status()
            value = message.recv(status)
            received.append((status.Get_source(), value))
        return received

    def abort(self, exit_code: int) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        # MPI would print a line of its own, which names neither the error nor the remedy.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the descriptor itself, whatever sys.stderr has become
        self._world.Abort(exit_code)
        time.sleep(5)  # the launcher ends this process; MPI_Abort may return before it has
        os._exit(exit_code)

    def at_close(self, action: Callable[[], object]) -> None:
        self._held.callback(action)

    def close(self) -> None:
        while self._sending and self._sending[0].Test():
            self._sending.popleft()
        self._held.close()
        self._promised.bytes = 0

    def finish(self) -> None:
        self.close()
        self._mpi.Finalize()

    def all_reduce_sum_for_comparison(self, send: NDArray[np.float32] | None, receive: NDArray[np.float32]) -> None:
        """Collective: MPI's sum of every `send` (None: `receive`) into `receive`, for benchmarks."""
        self._world.Allreduce(self._mpi.IN_PLACE if send is None else send, receive)


def _keep(sent: "deque[MPI.Request]", request: "MPI.Request") -> None:
    """A request keeps its buffer until it is sent."""
    while sent and sent[0].Test():
        sent.popleft()
    sent.append(request)


def _load_library() -> str:
    """Load the MPI library without starting MPI; its version text. Raises LaunchError without one."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True
        from mpi4py import MPI

        return MPI.Get_library_version()
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        remedy = "python -m pip install mpich   (or load your cluster's MPI and put its lib folder in LD_LIBRARY_PATH)"
        raise LaunchError(f"mpi4py finds no MPI library: {reason}", remedy=remedy) from error


def _exchange_first_messages(node: "MPI.Intracomm") -> None:
    """Exchange a message between all pairs of ranks of a node: some MPIs attach to a peer's memory at the first one."""
    sent, came = np.zeros(1, dtype=np.uint8), np.empty(1, dtype=np.uint8)
    for distance in range(1, node.size):
        to, source = (node.rank + distance) % node.size, (node.rank - distance) % node.size
        node.Sendrecv(sent, to, _FIRST_TAG, came, source, _FIRST_TAG)
    node.Barrier()
