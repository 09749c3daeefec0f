"""The interfaces of transports: a communication of a step, which begins and finishes; a group of ranks along a mesh
axis, in which values travel; `GradientSync`, by which a rank syncs gradients with its group along dp."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Generic, NamedTuple, TypeAlias, final

from torch import Tensor
from typing_extensions import TypeVar

from sambasim.collectives import additions
from sambasim.errors import InternalError
from sambasim.ir.program import Member, ParameterGroup
from sambasim.ir.types import Slice, TensorType
from sambasim.records.metrics import BytesMoved
from sambasim.runtime.values.mean import Wire
from sambasim.runtime.values.memory import DeviceMemory, slices_of
from sambasim.runtime.values.optimizers import Optimizers

R = TypeVar("R", default=object, covariant=True)


def nothing(*operands: object) -> None:
    """What a communication does that this rank does not take part in, or that needs no begin."""


class Communication(Generic[R]):
    """One communication of a step: `begin` with this rank's operands, then `finish` once `is_ready`."""

    begin: Callable[..., object] = staticmethod(nothing)
    """Starts with this rank's operands. Does not wait for ranks of this process."""
    is_ready: Callable[[], bool] = staticmethod(lambda: True)
    """Whether `finish` may be called. False only while other ranks of this process must run first."""
    finish: Callable[[], R]
    """Returns the result, or None where it is in device memory. May wait for other processes."""
    update_s = 0.0
    """Seconds of the last `finish` spent in a fused optimizer, which do not count as communication."""

    @staticmethod
    def tensor(operands: Sequence[object]) -> Tensor:
        """The one operand of a communication of values. Raises InternalError if it is no tensor."""
        if len(operands) == 1 and isinstance(operands[0], Tensor):
            return operands[0]
        raise InternalError(f"a communication takes one tensor, got {[type(operand).__name__ for operand in operands]}")


@final
class Simple(Communication[R]):
    """A communication of functions."""

    def __init__(
        self,
        finish: Callable[[], R],
        begin: Callable[..., object] = Communication.begin,
        is_ready: Callable[[], bool] = Communication.is_ready,
    ) -> None:
        self.finish, self.begin, self.is_ready = finish, begin, is_ready


class Shared(NamedTuple):
    """What ranks exchange in a step: the losses of all replicas, in rank order, each with the scalars that are logged
    beside it, and the largest request of a rank."""

    losses: Sequence[float]
    request: int


Combine: TypeAlias = Callable[[Sequence[Tensor]], Tensor]
"""Computes the result of a collective from the tensors of all ranks, in order."""


class AxisGroup(ABC):
    """Ranks of a job, usually a group along a mesh axis, seen from `rank`, the one at `position` of `size`. In a
    collective, every rank gets the tensors of all others and computes the result itself, for equal bits."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self.ranks = tuple(ranks)
        self.size, self.position = len(self.ranks), self.ranks.index(rank)

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


Fusions: TypeAlias = Mapping[tuple[str, ...], Callable[[Optimizers], Communication]]
"""By operators of adjacent update nodes (`opt`: any optimizer), what makes the communication that executes them."""


Slices: TypeAlias = Mapping[str, Sequence[Slice]]  # by parameter group, the slice of each rank


class GradientSync(ABC):
    """Syncs gradients among `group`. `memory` holds the parameters and optimizer states that this rank updates;
    `replicated`: every rank updates all parameters; `wire`: see `tree_mean`."""

    title: str
    """The name of the sync path in messages."""

    def __init__(self, memory: DeviceMemory, group: AxisGroup, wire: Wire, *, replicated: bool = False) -> None:
        self.program, self.memory, self.group, self.replicated = memory.program, memory, group, replicated
        self.wire = wire
        self.slices: Slices = slices_of(self.program, group.size)
        self.replicas, self.replica = group.size, group.position
        self.bytes_moved = BytesMoved()
        self.offered: tuple[Sequence[float], int] = (), 0
        self.observed: list[object] = [self]  # the objects whose methods report spans

    def summed(self, group: ParameterGroup) -> Slice:
        """The slice of `group` whose squares this rank sums: all ranks together sum each once."""
        return self.slices[group.name][self.replica]

    def updated(self, group: ParameterGroup) -> Slice:
        """The slice of `group` whose parameters and optimizer states this rank updates."""
        return (0, group.numel) if self.replicated else self.summed(group)

    def current(self, group: ParameterGroup) -> Slice:
        """The slice of `group` whose parameters and optimizer states are up to date in `memory`."""
        return self.updated(group)

    def saved(self, group: ParameterGroup) -> Slice:
        """The slice of `group` that this process writes into a checkpoint: all together write each part once."""
        return self.summed(group) if self.replicated else self.current(group)

    @abstractmethod
    def reduce_scatter(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        """Replaces the gradients that this rank updates by means over the replicas. None if there is nothing to do."""

    def all_gather(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        """Makes the updated parameters of all slices visible to every replica. None if there is nothing to do."""
        return None

    def fusions(self) -> Fusions:
        """Those of this sync path; lowering uses the longest pattern that matches."""
        return {}

    def releasing(self, group: ParameterGroup, region: str) -> Callable[[], None]:
        """A function that frees `region` of `group` outside the own slice, where this rank has memory for it alone."""
        return lambda: None  # kept whole

    def make_whole(self) -> None:
        """Collective. Make all parameters whole, where ranks keep slices only. Between steps."""
        self.settle()

    def settle(self) -> None:
        """Wait until all parameters that the last step has updated have arrived on this node."""
        return  # they do within the step

    def wait_for_updates(self) -> None:
        """Collective. After a step's all-gather, wait until all of this rank's parameters are updated."""
        return  # they are

    def wait_for_readers(self) -> None:
        """Wait until other ranks have read this rank's gradients of the last step, so that they may be overwritten."""
        return  # a step ends only after all gradients have been read

    def offer(self, losses: Sequence[float], request: int) -> None:
        """Set what `end_of_step` sends to the others: the loss of this rank's replica, if it has one, and a request."""
        self.offered = losses, request

    @abstractmethod
    def end_of_step(self) -> Shared:
        """Collective. Ends a step: all replicas see all updates. Returns what all ranks along dp have offered."""

    def whole(self, name: str) -> Tensor | None:
        """Collective. On rank 0, the trained parameter or optimizer state `name`, flat, whoever updates its slices;
        None on other ranks."""
        return self._whole(*self._places[name])

    @cached_property
    def _places(self) -> Mapping[str, tuple[ParameterGroup, Member, str]]:
        members = ((group, member) for group in self.program.groups for member in group.members)
        return {member.parameter: (group, member, "parameter") for group, member in members} | (
            self.program.optimizer_states
        )

    def _whole(self, group: ParameterGroup, member: Member, region: str) -> Tensor | None:
        own = self.memory.region(group, region)[member.start : member.start + member.numel]
        return own if self.replica == 0 else None
