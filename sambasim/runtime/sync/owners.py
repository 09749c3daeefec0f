"""Sync through the host in which each slice of a group has one owner, who adds it up and updates it."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from sambasim.collectives.slices import Slice
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.runtime.arguments import Arguments
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.sync.collect import collect
from sambasim.runtime.sync.exchange import Places, all_gather, reduce_scatter
from sambasim.runtime.sync.numbers import gather_losses, gather_norms
from sambasim.runtime.sync.phased import PhasedSync
from sambasim.runtime.trace.watched import Watched


class OwnersSync(PhasedSync):
    """Gradients travel to their owners, and parameters from them. `places` says where they are and who owns what."""

    def __init__(
        self,
        program: Program,
        arguments: Arguments,
        optimizers: Optimizers,
        places: Places,
        communicator: Communicator,
    ) -> None:
        super().__init__(program, arguments, optimizers, places.kept)
        self._places = places
        self._communicator = communicator
        self._rank = communicator.topology.rank
        self._reduce_scatter = reduce_scatter(program, places, self.divisor, communicator)
        self._all_gather = all_gather(program, places, communicator)

    def owned(self, group: ParameterGroup) -> Slice:
        return self._places.slices[group.name][self._rank]

    def reduce(self) -> None:
        self._reduce_scatter(self.bytes_moved)

    def gather(self) -> None:
        self._all_gather(self.bytes_moved)

    def gather_norms(self, sums: Mapping[str, Sequence[float]]) -> list[float]:
        return gather_norms(self.program, self._places.slices, self._communicator, sums)

    def gather_losses(self, losses: Sequence[float], wish: int) -> tuple[Sequence[float], int]:
        return gather_losses(self._communicator, losses, wish, self._places.workers)

    def whole_state(self, group: ParameterGroup, member: Member, state: str) -> Tensor | None:
        own = {self._rank: self.memory.region(group, state)}
        return collect(self._communicator, own, self._places.slices[group.name], member)

    def transfers(self) -> Sequence[Watched]:
        return (*self._reduce_scatter.watched(), *self._all_gather.watched())
