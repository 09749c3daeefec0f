"""The interface `GradientSync`: how a rank syncs gradients with the other ranks of its group along dp."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from sambasim.ir.dataflow import is_clipped
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.ir.types import Slice, cut, cut_at
from sambasim.runtime.transports.communication import AxisGroup, BytesMoved, Communication, EndOfStep, Shared
from sambasim.runtime.values.device import DeviceMemory
from sambasim.runtime.values.optimizers import Optimizers


@dataclass(frozen=True, slots=True)
class Fusion:
    """Adjacent update nodes that one instruction executes together. `pattern`: the operators in order, with `opt` for
    any optimizer; `bind`: makes the communication from the optimizers."""

    pattern: tuple[str, ...]
    bind: Callable[[Optimizers], Communication]


class GradientSync(ABC):
    """Syncs gradients among `group`. `memory` holds the parameters and optimizer states that this rank updates;
    `slices`: for each parameter group, the slice of each rank; `replicated`: every rank updates all parameters."""

    title: str
    """The name of the sync path in messages."""

    def __init__(
        self,
        program: Program,
        memory: DeviceMemory,
        group: AxisGroup,
        slices: Mapping[str, Sequence[Slice]] | None = None,
        *,
        replicas: int | None = None,
        replicated: bool = False,
    ) -> None:
        self.program = program
        self.memory = memory
        self.group = group
        self.slices = slices_of(program, group.size) if slices is None else slices
        self.replicas = group.size if replicas is None else replicas
        self.replica = group.position
        self.replicated = replicated
        self.bytes_moved = BytesMoved()
        self.offered = Shared((), 0)
        self.observed: list[object] = [self]
        """The objects whose methods report spans."""

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
        return self.summed(group)

    @abstractmethod
    def reduce_scatter(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        """Replaces the slices of the gradients that this rank updates by means over the replicas. None if there is
        nothing to do."""

    def all_gather(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        """Makes the updated parameters of all slices visible to every replica. None if there is nothing to do."""
        return None

    def fusions(self) -> Sequence[Fusion]:
        """The fused instructions of this sync path; lowering uses the longest pattern that matches."""
        return ()

    def releasing(self, group: ParameterGroup, region: str) -> Callable[[], None]:
        """A function that frees `region` of `group` outside the own slice, where this rank has memory for it alone."""
        return lambda: None  # kept whole

    def make_whole(self) -> None:
        """Collective. Make all parameters whole, where ranks keep slices only. Between steps."""
        return  # they are

    def wait_for_updates(self) -> None:
        """Collective. After a step's all-gather, wait until all of this rank's parameters are updated."""
        return  # they are

    def wait_for_readers(self) -> None:
        """Wait until other ranks have read this rank's gradients of the last step, so that they may be overwritten."""
        return  # a step ends only after all gradients have been read

    def offer(self, losses: Sequence[float], request: int) -> None:
        """Set what `end_of_step` sends to the others: the loss of this rank's replica, if it has one, and a request."""
        self.offered = Shared(losses, request)

    @abstractmethod
    def end_of_step(self) -> EndOfStep:
        """The communication along dp that ends every step."""

    def whole_state(self, group: ParameterGroup, member: Member, state: str) -> Tensor | None:
        """Collective. On rank 0, `state` of one parameter, flat, whoever updates its slices; None on other ranks."""
        own = self.memory.region(group, state)[member.start : member.start + member.numel]
        return own if self.replica == 0 else None


def slices_of(program: Program, ranks: int) -> Mapping[str, tuple[Slice, ...]]:
    """For each group, its slices for so many ranks. Where gradients are clipped, slices cut no block of the norm."""
    if is_clipped(program):
        slices = cut_at([(group.block_starts, group.numel) for group in program.groups], ranks)
        return {group.name: of_ranks for group, of_ranks in zip(program.groups, slices, strict=True)}
    return {group.name: cut(group.numel, ranks) for group in program.groups}
