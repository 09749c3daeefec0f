"""The interfaces `Transport` and `Communication`: a transport connects one rank to the others along a mesh axis."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeAlias, final

from torch import Tensor
from typing_extensions import TypeVar

from sambasim.errors import InternalError
from sambasim.ir.dataflow import is_clipped
from sambasim.ir.mesh import Mesh, mesh_of
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.ir.types import Slice, cut, cut_at
from sambasim.runtime.values.device import DeviceMemory
from sambasim.runtime.values.optimizers import Optimizers
from sambasim.runtime.watch.observer import StepObserver

if TYPE_CHECKING:
    from sambasim.runtime.transports.in_process import Hub
    from sambasim.runtime.transports.values import Line


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
    def __init__(self, function: Callable[[], R]) -> None:
        self._function = function

    def finish(self) -> R:
        return self._function()


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


@dataclass(frozen=True, slots=True)
class Fusion:
    """Adjacent update nodes that one instruction executes together. `pattern`: the operators in order, with `opt` for
    any optimizer; `bind`: makes the communication from the optimizers."""

    pattern: tuple[str, ...]
    bind: Callable[[Optimizers], Communication]


class Transport(ABC):
    """Connects one rank to the others of its mesh. `memory` holds the parameters and optimizer states that this rank
    updates; `slices`: for each group, the slice of each rank; `replicated`: every rank updates all parameters."""

    title: str
    """The name of the sync path in messages."""

    def __init__(
        self,
        program: Program,
        memory: DeviceMemory,
        replica: int,
        slices: Mapping[str, Sequence[Slice]],
        replicas: int,
        *,
        replicated: bool = False,
    ) -> None:
        self.program = program
        self.memory = memory
        self.slices = slices
        self.replicas = replicas
        self.replica = replica
        self.rank = replica
        """The number in the mesh, under which spans are reported."""
        self.replicated = replicated
        self.bytes_moved = BytesMoved()
        self.observer: StepObserver | None = None
        self.offered = Shared((), 0)

    @property
    def hub(self) -> "Hub | None":
        """Connects the ranks of this process; None if there is one for each process."""
        return None

    @property
    def mesh(self) -> Mesh:
        return mesh_of(self.program.mesh, self.replicas)

    @property
    def gives_loss(self) -> bool:
        return self.mesh.gives_loss(self.rank)

    @property
    def is_first_copy(self) -> bool:
        return self.mesh.is_first_copy(self.rank)

    def owned(self, group: ParameterGroup) -> Slice:
        """The part of `group` whose parameters and optimizer states this rank updates."""
        return (0, group.numel) if self.replicated else self.share(group)

    def share(self, group: ParameterGroup) -> Slice:
        """The part of `group` whose squares this rank sums: all ranks together sum each once."""
        return self.slices[group.name][self.replica]

    def kept(self, group: ParameterGroup) -> Slice:
        """The part of `group` whose parameters and optimizer states are up to date in `memory`."""
        return self.owned(group)

    def saved(self, group: ParameterGroup) -> Slice:
        """The part of `group` that this process writes into a checkpoint: all together write each part once."""
        return self.share(group)

    def line(self, axis: str) -> "Line":
        """The group along `axis` that this rank belongs to."""
        return self.line_of(self.mesh.group(self.rank, axis))

    @abstractmethod
    def line_of(self, ranks: Sequence[int]) -> "Line":
        """Connects `ranks`, which include this one."""

    @abstractmethod
    def reduce_scatter(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        """Replaces the owned slices of the gradients by means over the replicas. None if there is nothing to do."""

    def all_gather(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        """Makes the updated parameters of all slices visible to every replica. None if there is nothing to do."""
        return None

    def releasing(self, group: ParameterGroup, region: str) -> Callable[[], None]:
        """A function that frees `region` of `group` outside the own slice, where this rank has memory for it alone."""
        return lambda: None  # kept whole

    def make_whole(self) -> None:
        """Collective. Make all parameters whole, where ranks keep slices only. Between steps."""
        return  # they are

    def wait_for_updates(self) -> None:
        """Collective along dp. After a step's all-gather, wait until all of this rank's parameters are updated."""
        return  # they are

    def offer(self, losses: Sequence[float], request: int) -> None:
        """Set what `end_step` sends to the others: the loss of this rank's replica, if it has one, and a request."""
        self.offered = Shared(losses, request)

    @abstractmethod
    def end_step(self) -> EndOfStep:
        """The communication that ends every step."""

    def wait_for_readers(self) -> None:
        """Wait until other ranks have read this rank's gradients of the last step, so that they may be overwritten."""
        return  # a step ends only after all gradients have been read

    def whole_state(self, group: ParameterGroup, member: Member, state: str) -> Tensor | None:
        """Collective. On rank 0, `state` of one parameter, flat, whoever owns its slices; None on other ranks."""
        own = self.memory.region(group, state)[member.start : member.start + member.numel]
        return own if self.replica == 0 else None

    def fusions(self) -> Sequence[Fusion]:
        """The fused instructions of this transport; lowering uses the longest pattern that matches."""
        return ()

    def group(self, name: str) -> ParameterGroup:
        for group in self.program.groups:
            if group.name == name:
                return group
        raise InternalError(f"the program has no group {name}")


def slices_of(program: Program, ranks: int) -> Mapping[str, tuple[Slice, ...]]:
    """For each group, its slices for so many ranks. Where gradients are clipped, slices cut no block of the norm."""
    if is_clipped(program):
        slices = cut_at([(group.block_starts, group.numel) for group in program.groups], ranks)
        return {group.name: of_ranks for group, of_ranks in zip(program.groups, slices, strict=True)}
    return {group.name: cut(group.numel, ranks) for group in program.groups}
