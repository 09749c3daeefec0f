"""Sync through the host in which every rank updates everything, so that each has the whole state of the optimizers.

    REDUCE   as in `host`; and then the means of all owners to every rank
    GATHER   nothing: every rank updates all parameters, with the bits of their owners

It moves no byte more than `host` does. What it costs is that N ranks do the optimizer's work N times; what it gives is
that any one of them can save a checkpoint, without asking the others.
"""

from collections.abc import Sequence

from sambasim.ir.program import Program
from sambasim.runtime.arguments import Arguments
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.sync.everybody import EverybodySync
from sambasim.runtime.sync.exchange import Places, all_gather, reduce_scatter
from sambasim.runtime.sync.interface import slices_of
from sambasim.runtime.trace.watched import Watched


class ReplicatedHostSync(EverybodySync):
    """Device to host, exchange between hosts by MPI, host to device. Every rank owns everything."""

    def __init__(
        self,
        program: Program,
        arguments: Arguments,
        optimizers: Optimizers,
        memory: DeviceMemory,
        communicator: Communicator,
    ) -> None:
        super().__init__(program, arguments, optimizers, memory, communicator)
        world_size = communicator.topology.world_size
        places = Places(range(world_size), slices_of(program, world_size), device=memory, kept=memory)
        self._reduce_scatter = reduce_scatter(program, places, self.divisor, communicator)
        self._spread = all_gather(program, places, communicator, "gradient")

    @property
    def title(self) -> str:
        return "host (device to host, MPI, host to device), every replica updating everything"

    def reduce(self) -> None:
        self._reduce_scatter(self.bytes_moved)
        self._spread(self.bytes_moved)

    def transfers(self) -> Sequence[Watched]:
        return (*self._reduce_scatter.watched(), *self._spread.watched())
