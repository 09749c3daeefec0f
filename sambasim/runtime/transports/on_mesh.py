"""A rank of a mesh with several axes: along dp it has a transport of its own; along tp it uses shared memory, if the
ranks are on one node; all other values are sent as messages."""

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor

from sambasim.collectives.slices import Slice
from sambasim.ir.mesh import TENSOR, Mesh
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.runtime.observer import StepObserver
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.transports.base import Communication, EndOfStep, Fusion, Shared, Transport
from sambasim.runtime.transports.mailbox import MailboxLine, box_bytes
from sambasim.runtime.transports.values import GatherLosses, Line, MessageLine


@final
class OnMesh(Transport):
    """`along_dp`: the transport of this rank's group along dp, over a communicator of that group; `communicator`: that
    of all ranks of `mesh`."""

    def __init__(self, program: Program, along_dp: Transport, communicator: Communicator, mesh: Mesh) -> None:
        self._along_dp = along_dp
        self._mesh = mesh
        self.communicator = communicator
        replicas = along_dp.replicas
        super().__init__(
            program, along_dp.memory, along_dp.replica, along_dp.slices, replicas, replicated=along_dp.replicated
        )
        self.rank = along_dp.rank = communicator.rank
        self.bytes_moved = along_dp.bytes_moved
        self.title = f"mesh {mesh}" + (f", along dp: {along_dp.title}" if replicas > 1 else "")
        self.gather_losses = GatherLosses(
            communicator, [rank for rank in range(mesh.world_size) if mesh.gives_loss(rank)]
        )
        along_tp = mesh.group(communicator.rank, TENSOR)
        self._along_tp: Line = MessageLine(communicator, along_tp)
        size_bytes = box_bytes(program, TENSOR)
        if size_bytes and len({communicator.node_of[rank] for rank in along_tp}) == 1:
            self._along_tp = MailboxLine(self._along_tp, communicator.subset(along_tp), self, size_bytes)

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

    def line_of(self, ranks: Sequence[int]) -> Line:
        return self._along_tp if tuple(ranks) == self._along_tp.ranks else MessageLine(self.communicator, ranks)

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

    def offer(self, losses: Sequence[float], request: int) -> None:
        self._along_dp.offer(losses, request)
        self.offered = Shared(losses if self.gives_loss else (), request)

    def end_step(self) -> EndOfStep:
        return _End(self, self._along_dp.end_step())

    def wait_for_readers(self) -> None:
        self._along_dp.wait_for_readers()

    def whole_state(self, group: ParameterGroup, member: Member, state: str) -> Tensor | None:
        return self._along_dp.whole_state(group, member, state)


@final
class _End(EndOfStep):
    """The end of a step along dp, and then of all ranks."""

    def __init__(self, transport: OnMesh, along_dp: EndOfStep) -> None:
        self._transport = transport
        self._along_dp = along_dp

    def begin(self, *operands: object) -> None:
        self._along_dp.begin(*operands)

    def finish(self) -> Shared:
        self._along_dp.finish()
        return self._transport.gather_losses(*self._transport.offered)
