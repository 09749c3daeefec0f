"""A rank of a mesh with several axes: along dp it has a transport of its own. Along the others it meets ranks of its
process; or it sends messages, and along tp uses shared memory, if the ranks are on one node."""

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor

from sambasim.errors import MachineError
from sambasim.ir.mesh import DATA_PARALLEL, TENSOR, Mesh
from sambasim.ir.program import Member, ParameterGroup
from sambasim.ir.types import Slice
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.transports.base import Communication, EndOfStep, Fusion, Shared, Transport
from sambasim.runtime.transports.in_process import Hub, HubLine, Together, all_of
from sambasim.runtime.transports.mailbox import MailboxLine, box_bytes
from sambasim.runtime.transports.values import GatherLosses, Line, MessageLine
from sambasim.runtime.watch.observer import StepObserver


class OnMesh(Transport):
    """Rank `rank` of `mesh`. `along_dp`: the transport of its group along dp, over a communicator of that group."""

    def __init__(self, along_dp: Transport, mesh: Mesh, rank: int, title: str) -> None:
        self._along_dp = along_dp
        self._mesh = mesh
        replicas = along_dp.replicas
        super().__init__(
            along_dp.program,
            along_dp.memory,
            along_dp.replica,
            along_dp.slices,
            replicas,
            replicated=along_dp.replicated,
        )
        self.rank = along_dp.rank = rank
        self.bytes_moved = along_dp.bytes_moved
        self.title = title + (f", along dp: {along_dp.title}" if replicas > 1 else "")

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def observer(self) -> StepObserver | None:
        return self._along_dp.observer

    @observer.setter
    def observer(self, observer: StepObserver | None) -> None:
        self._along_dp.observer = observer

    def kept(self, group: ParameterGroup) -> Slice:
        return self._along_dp.kept(group)

    def saved(self, group: ParameterGroup) -> Slice:
        return self._along_dp.saved(group)

    def reduce_scatter(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        return self._along_dp.reduce_scatter(groups)

    def all_gather(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        return self._along_dp.all_gather(groups)

    def releasing(self, group: ParameterGroup, region: str) -> Callable[[], None]:
        return self._along_dp.releasing(group, region)

    def make_whole(self) -> None:
        self._along_dp.make_whole()

    def fusions(self) -> Sequence[Fusion]:
        # Those of a clipped update take its all-reduce for the only one, along dp.
        return [one for one in self._along_dp.fusions() if "comm.all_reduce" not in one.pattern]

    def wait_for_updates(self) -> None:
        self._along_dp.wait_for_updates()

    def offer(self, losses: Sequence[float], request: int) -> None:
        self._along_dp.offer(losses, request)
        self.offered = Shared(losses if self.gives_loss else (), request)

    def wait_for_readers(self) -> None:
        self._along_dp.wait_for_readers()

    def whole_state(self, group: ParameterGroup, member: Member, state: str) -> Tensor | None:
        return self._along_dp.whole_state(group, member, state)


@final
class ByMessages(OnMesh):
    """The only rank of its process. `communicator`: that of all ranks of `mesh`."""

    def __init__(self, along_dp: Transport, mesh: Mesh, communicator: Communicator) -> None:
        super().__init__(along_dp, mesh, communicator.rank, f"mesh {mesh}")
        self.communicator = communicator
        self.gather_losses = GatherLosses(
            communicator, [rank for rank in range(mesh.world_size) if mesh.gives_loss(rank)]
        )
        along_tp = mesh.group(communicator.rank, TENSOR)
        messages = MessageLine(communicator, along_tp)
        self._along_tp: Line = messages
        size_bytes = max(communicator.all_gather_object(box_bytes(along_dp.program, TENSOR)))
        if size_bytes and all(
            communicator.node_of[rank] == communicator.node_of[mesh.group(rank, TENSOR)[0]]
            for rank in range(mesh.world_size)
        ):
            try:
                self._along_tp = MailboxLine(messages, communicator.subset(along_tp), self, size_bytes)
            except MachineError:
                self.title += ", messages along tp, because there is too little shared memory"

    def line_of(self, ranks: Sequence[int]) -> Line:
        return self._along_tp if tuple(ranks) == self._along_tp.ranks else MessageLine(self.communicator, ranks)

    def end_step(self) -> EndOfStep:
        return _EndByMessages(self, self._along_dp.end_step())


@final
class _EndByMessages(EndOfStep):
    """The end of a step along dp, and then of all ranks."""

    def __init__(self, transport: ByMessages, along_dp: EndOfStep) -> None:
        self._transport = transport
        self._along_dp = along_dp

    def begin(self, *operands: object) -> None:
        self._along_dp.begin(*operands)

    def finish(self) -> Shared:
        self._along_dp.finish()
        return self._transport.gather_losses(*self._transport.offered)


@final
class InOneProcess(OnMesh):
    """One of the ranks of a replica, which all run in this process, connected by `hub`.

    No deadlock: all processes resume these ranks in the same order, and a rank yields only where it waits for another
    one of its process, so all processes come to the communications along dp in the same order.
    """

    def __init__(self, along_dp: Transport, mesh: Mesh, rank: int, hub: Hub) -> None:
        super().__init__(along_dp, mesh, rank, f"mesh {mesh}, one process for each replica")
        self._hub = hub

    @property
    def hub(self) -> Hub:
        return self._hub

    def line(self, axis: str) -> Line:
        return self._along_dp.line_of(range(self.replicas)) if axis == DATA_PARALLEL else super().line(axis)

    def line_of(self, ranks: Sequence[int]) -> HubLine:
        return HubLine(self._hub, ranks, self.rank)

    def end_step(self) -> EndOfStep:
        return _EndInOneProcess(self, self._along_dp.end_step())


@final
class _EndInOneProcess(EndOfStep):
    """The end of a step along dp, and then of the ranks of this process. The rank that gives the loss has received
    those of all replicas along dp."""

    def __init__(self, transport: InOneProcess, along_dp: EndOfStep) -> None:
        self._gives_loss = transport.gives_loss
        self._along_dp = along_dp
        ranks = transport.line_of(transport.mesh.ranks_of(transport.replica))
        self._here = Together(ranks, "end of step", lambda operands: operands[0], all_of)

    def begin(self, *operands: object) -> None:
        self._along_dp.begin(*operands)
        shared = self._along_dp.finish()
        self._here.begin(shared if self._gives_loss else shared._replace(losses=()))

    def is_ready(self) -> bool:
        return self._here.is_ready()

    def finish(self) -> Shared:
        return self._here.finish()
