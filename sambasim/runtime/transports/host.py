"""Host sync, as in a SambaFlow run without `--reduce-on-rdu`; the copies and host buffers are real.

    REDUCE   device -> host: all gradients;  MPI: slice r of every replica to rank r, which adds them;
             host -> device: the mean of the owned slice
    GATHER   device -> host: the owned slice of the parameters;  MPI: every slice to every rank;
             host -> device: the slices of the others

With `replicated`, every rank updates everything: REDUCE sends the means of all owners to every rank, and GATHER is
empty. The number of bytes is the same, every rank runs the whole optimizer, and any rank can save a checkpoint.

With a parameter server (Li et al., OSDI 2014, "Scaling Distributed Machine Learning with the Parameter Server"), some
ranks own all slices, in host memory. It is synchronous: servers wait for all workers and add in the order of the tree,
so the bits are those of the other paths.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from sambasim.collectives.slices import Slice
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.records.trace import Track
from sambasim.runtime.device import DeviceMemory, private_storage
from sambasim.runtime.observer import StepObserver, span
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.transports.base import Communication, EndOfStep, Shared, Transport, slices_of
from sambasim.runtime.transports.exchange import Exchange, Places, all_gather, reduce_scatter
from sambasim.runtime.transports.messages import collect, gather_losses
from sambasim.runtime.transports.values import MessageLine


@dataclass(frozen=True, slots=True)
class Roles:
    """What the ranks of a job do: train a replica, serve parameters, or both. Ascending."""

    workers: tuple[int, ...]
    servers: tuple[int, ...] = ()


def roles_of(world_size: int, dedicated: int) -> Roles:
    """The last `dedicated` ranks only serve; where there are none, rank 0 serves beside its work."""
    first_server = world_size - dedicated
    servers = tuple(range(first_server, world_size)) if dedicated else (0,)
    return Roles(tuple(range(first_server)), servers)


@final
class Host(Transport):
    """Device to host, an exchange between hosts by MPI, host to device. `places`: who owns which slice, and where."""

    def __init__(
        self,
        program: Program,
        places: Places,
        communicator: Communicator,
        title: str,
        *,
        replicated: bool = False,
    ) -> None:
        line = MessageLine(communicator, range(communicator.world_size))
        super().__init__(program, places.kept, line, len(places.workers), communicator.rank)
        self.communicator = communicator
        self.places = places
        self._title = title
        self._replicated = replicated

    @property
    def title(self) -> str:
        return self._title

    def owned(self, group: ParameterGroup) -> Slice:
        return (0, group.numel) if self._replicated else self.share(group)

    def share(self, group: ParameterGroup) -> Slice:
        return self.places.slices[group.name][self.communicator.rank]

    def reduce_scatter(self, groups: Sequence[ParameterGroup]) -> Communication:
        exchanges = [reduce_scatter(groups, self.places, self.replicas, self)]
        if self._replicated:
            exchanges.append(all_gather(groups, self.places, self, "gradient"))
        return _Exchanged(self, exchanges)

    def all_gather(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        return None if self._replicated else _Exchanged(self, [all_gather(groups, self.places, self)])

    def end_step(self) -> EndOfStep:
        return GatheredLosses(self, self.communicator, self.places.workers)

    def whole_state(self, group: ParameterGroup, member: Member, state: str) -> Tensor | None:
        own = self.memory.region(group, state)
        if self._replicated:
            return own[member.start : member.start + member.numel] if self.communicator.rank == 0 else None
        return collect(self.communicator, {self.communicator.rank: own}, self.places.slices[group.name], member)


def among_equals(
    program: Program, memory: DeviceMemory, communicator: Communicator, *, replicated: bool = False
) -> Host:
    """Every rank trains a replica, in `memory`, and owns a slice."""
    size = communicator.world_size
    places = Places(range(size), slices_of(program, size), device=memory, kept=memory)
    title = "host (device to host, MPI, host to device)" + (", every replica updating everything" if replicated else "")
    return Host(program, places, communicator, title, replicated=replicated)


def parameter_server(program: Program, memory: DeviceMemory, roles: Roles, communicator: Communicator) -> Host:
    """Sync by parameter servers. `memory` is the device memory of this rank's replica; on a server without a replica,
    host memory that contains the parameters."""
    rank, servers = communicator.rank, roles.servers
    works, serves = rank in roles.workers, rank in servers
    places = Places(
        roles.workers,
        _served_slices(program, roles, communicator.world_size),
        device=memory if works else None,
        kept=_served_from_host(program, memory) if works and serves else memory,
    )
    if servers == (0,):
        who = "parameter server: rank 0, which also works"
    elif len(servers) == 1:
        who = f"parameter server: rank {servers[0]}"
    else:
        who = f"parameter servers: ranks {servers[0]} to {servers[-1]}"
    return Host(program, places, communicator, f"host ({who})")


def _served_slices(program: Program, roles: Roles, world_size: int) -> Mapping[str, tuple[Slice, ...]]:
    """For each group, the slice that each rank serves."""
    nothing: Mapping[int, Slice] = dict.fromkeys(range(world_size), (0, 0))
    return {
        name: tuple({**nothing, **dict(zip(roles.servers, served, strict=True))}.values())
        for name, served in slices_of(program, len(roles.servers)).items()
    }


def _served_from_host(program: Program, device: DeviceMemory) -> DeviceMemory:
    """Host memory with the layout of the device, and the initial parameters of `device`."""
    host = DeviceMemory(program, private_storage(program.device_bytes))
    for group in program.groups:
        host.region(group, "parameter").copy_(device.region(group, "parameter"))
    return host


@final
class _Exchanged(Communication):
    def __init__(self, transport: Transport, exchanges: Sequence[Exchange]) -> None:
        self._transport = transport
        self._exchanges = exchanges

    def begin(self, *operands: object) -> None:
        """Nothing: an exchange needs all ranks."""

    def finish(self) -> object:
        for exchange in self._exchanges:
            exchange(self._transport.bytes_moved)
        return None


@final
class GatheredLosses(EndOfStep):
    """The end of a step for transports whose updates have already arrived: it gathers losses and requests."""

    def __init__(self, transport: Transport, communicator: Communicator, workers: Sequence[int]) -> None:
        self._transport = transport
        self._communicator = communicator
        self._workers = workers
        self.replica = transport.replica

    @property
    def observer(self) -> StepObserver | None:
        return self._transport.observer

    def begin(self, *operands: object) -> None:
        """Nothing."""

    @span(Track.COLLECTIVES, "losses of all")
    def finish(self) -> Shared:
        return gather_losses(self._communicator, *self._transport.offered, self._workers)
