"""Sync after which every rank updates everything: nothing of an optimizer is kept in slices."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from sambasim.collectives.slices import Slice
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.runtime.arguments import Arguments
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.sync.interface import slices_of
from sambasim.runtime.sync.numbers import gather_losses
from sambasim.runtime.sync.phased import PhasedSync


class EverybodySync(PhasedSync):
    """After `reduce`, every rank has all mean gradients, the same bits on each."""

    def __init__(
        self,
        program: Program,
        arguments: Arguments,
        optimizers: Optimizers,
        memory: DeviceMemory,
        communicator: Communicator,
    ) -> None:
        super().__init__(program, arguments, optimizers, memory)
        self._communicator = communicator

    def owned(self, group: ParameterGroup) -> Slice:
        return (0, group.numel)

    def saved(self, group: ParameterGroup) -> Slice:
        return slices_of(self.program, self._communicator.world_size)[group.name][self._communicator.rank]

    def gather(self) -> None:
        """Nothing: every rank has updated all parameters, alike."""

    def gather_norms(self, sums: Mapping[str, Sequence[float]]) -> list[float]:
        return [block for group in self.program.groups for block in sums[group.name]]

    def gather_losses(self, losses: Sequence[float], wish: int) -> tuple[Sequence[float], int]:
        return gather_losses(self._communicator, losses, wish, range(self._communicator.world_size))

    def whole_state(self, group: ParameterGroup, member: Member, state: str) -> Tensor | None:
        if self._communicator.topology.rank != 0:
            return None
        return self.memory.region(group, state)[member.start : member.start + member.numel]
