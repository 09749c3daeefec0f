"""Sync through a parameter server, synchronous: Li et al., OSDI 2014, "Scaling Distributed Machine Learning with the
Parameter Server".

    push     device -> host: all gradients;  MPI: to the servers, which add them up, each for its part of the parameters
    update   the servers hold the parameters and the state of the optimizer, in memory of their hosts
    pull     MPI: the parameters from the servers to every worker;  host -> device: all of them

Servers wait for all workers, and add in the order of the tree: the bits are those of the other paths. One server moves
as many bytes as all ranks do in an exchange among equals, and all of them go through its one host.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from sambasim.collectives.slices import Slice
from sambasim.ir.program import Program
from sambasim.runtime.arguments import Arguments
from sambasim.runtime.device import DeviceMemory, private_storage
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.sync.exchange import Places
from sambasim.runtime.sync.interface import slices_of
from sambasim.runtime.sync.owners import OwnersSync


@dataclass(frozen=True, slots=True)
class Roles:
    """What the ranks of a job do: train a replica, serve, or both. Ascending."""

    workers: tuple[int, ...]
    servers: tuple[int, ...]


def roles(world_size: int, dedicated: int) -> Roles:
    """The last `dedicated` ranks only serve; where there are none, rank 0 serves beside its work."""
    first_server = world_size - dedicated
    servers = tuple(range(first_server, world_size)) if dedicated else (0,)
    return Roles(tuple(range(first_server)), servers)


class ParameterServerSync(OwnersSync):
    """`memory` is the device of this rank's replica; where the rank only serves, memory of its host, with the
    parameters in their places."""

    def __init__(
        self, program: Program, arguments: Arguments, memory: DeviceMemory, roles: Roles, communicator: Communicator
    ) -> None:
        rank = communicator.topology.rank
        works, serves = rank in roles.workers, rank in roles.servers
        kept = _served_from_host(program, memory) if works and serves else memory
        places = Places(
            roles.workers,
            _slices(program, roles, communicator.topology.world_size),
            device=memory if works else None,
            kept=kept,
        )
        super().__init__(program, arguments, Optimizers(program, kept, arguments), places, communicator)
        self._roles = roles

    @property
    def title(self) -> str:
        servers = self._roles.servers
        if servers == (0,):
            return "host (parameter server: rank 0, which also works)"
        if len(servers) == 1:
            return f"host (parameter server: rank {servers[0]})"
        return f"host (parameter servers: ranks {servers[0]} to {servers[-1]})"


def _slices(program: Program, roles: Roles, world_size: int) -> Mapping[str, tuple[Slice, ...]]:
    """For each group, what each rank serves of it."""
    nothing: Mapping[int, Slice] = dict.fromkeys(range(world_size), (0, 0))
    return {
        name: tuple({**nothing, **dict(zip(roles.servers, served, strict=True))}.values())
        for name, served in slices_of(program, len(roles.servers)).items()
    }


def _served_from_host(program: Program, device: DeviceMemory) -> DeviceMemory:
    """Memory of the host, laid out as the device's is, with the parameters that the device begins with."""
    host = DeviceMemory(program, private_storage(program.device_bytes))
    for group in program.groups:
        host.region(group, "parameter").copy_(device.region(group, "parameter"))
    return host
