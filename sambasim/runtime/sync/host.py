"""Sync through the host, as a SambaFlow run without `--reduce-on-rdu` does it.

    REDUCE   device -> host: all gradients;  MPI: slice r of every replica to rank r, which adds them;
             host -> device: the mean of the owned slice
    GATHER   device -> host: the owned slice of the parameters;  MPI: every slice to every rank;
             host -> device: the slices of the others

The copies between device and host are real, and so are the host's buffers.
"""

from sambasim.ir.program import Program
from sambasim.runtime.arguments import Arguments
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.sync.exchange import Places
from sambasim.runtime.sync.interface import slices_of
from sambasim.runtime.sync.owners import OwnersSync


class HostSync(OwnersSync):
    """Device to host, exchange between hosts by MPI, host to device. Every rank owns a slice."""

    def __init__(
        self,
        program: Program,
        arguments: Arguments,
        optimizers: Optimizers,
        memory: DeviceMemory,
        communicator: Communicator,
    ) -> None:
        world_size = communicator.topology.world_size
        places = Places(range(world_size), slices_of(program, world_size), device=memory, kept=memory)
        super().__init__(program, arguments, optimizers, places, communicator)

    @property
    def title(self) -> str:
        return "host (device to host, MPI, host to device)"
