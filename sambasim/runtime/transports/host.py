"""Host sync, as in a SambaFlow run without `--reduce-on-rdu`; the copies and host buffers are real.

    REDUCE   device -> host: all gradients;  MPI: slice r of every replica to rank r, which adds them;
             host -> device: the mean of the owned slice
    GATHER   device -> host: the owned slice of the parameters;  MPI: every slice to every rank;
             host -> device: the slices of the others

With `replicated` or gloo, every rank updates everything, and GATHER is empty. With parameter servers (Li et al., OSDI
2014), some ranks own all slices, in host memory; servers wait for all workers, so the bits are those of MPI.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar, final

import torch
import torch.distributed as dist
from torch import Tensor

from sambasim.ir.program import Member, ParameterGroup
from sambasim.records.trace import Track
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.process import gloo_errors
from sambasim.runtime.transports.communication import Communication, GradientSync, Shared, Simple
from sambasim.runtime.transports.exchange import Exchange, Places, all_gather, reduce_scatter
from sambasim.runtime.transports.messages import MessageGroup, collect, gather_losses
from sambasim.runtime.values.mean import Wire
from sambasim.runtime.values.memory import DeviceMemory, slices_of
from sambasim.runtime.watch.observer import span

C = TypeVar("C", bound=Communication)

GLOO_EXEMPT = "gloo adds gradients in an order of its own, so the bits may differ from those of other sync paths"


class Roles(NamedTuple):
    """What the ranks of a job do: train a replica, serve parameters, or both. Ascending."""

    workers: tuple[int, ...]
    servers: tuple[int, ...] = ()


def roles_of(world_size: int, dedicated: int) -> Roles:
    """The last `dedicated` ranks only serve; where there are none, rank 0 serves beside its work."""
    first_server = world_size - dedicated
    servers = tuple(range(first_server, world_size)) if dedicated else (0,)
    return Roles(tuple(range(first_server)), servers)


@final
class Host(GradientSync):
    """Device to host, an exchange by MPI, host to device. `through_gloo`: by gloo, and all ranks update everything."""

    def __init__(self, places: Places, *, replicated: bool = False, through_gloo: bool = False) -> None:
        group = MessageGroup(places.communicator)  # also of servers: they update slices, so the norm is theirs too
        super().__init__(places.kept, group, places.wire, replicated=replicated or through_gloo)
        self.title = f"host (device to host, {'gloo' if through_gloo else 'MPI'}, host to device)"
        self.title += ", every replica updating everything" if replicated else ""
        self.slices, self.replicas = places.slices, len(places.workers)
        self.bytes_moved, self.places, self._through_gloo = places.moved, places, through_gloo
        self._exchange_losses = gather_losses(places.communicator, places.workers, self.program.exchanged)

    @span(Track.COLLECTIVES, "losses of all")
    def end_of_step(self) -> Shared:
        return self._exchange_losses(*self.offered)()

    def reduce_scatter(self, groups: Sequence[ParameterGroup]) -> Communication:
        if self._through_gloo:
            return self._observed(_GlooAllReduce(self, groups))
        reduce = self._observed(reduce_scatter(groups, self.places))
        if not self.replicated:
            return reduce
        both: Sequence[Communication] = (reduce, self._observed(all_gather(groups, self.places, "gradient")))
        return Simple(lambda: [one.finish() for one in both])

    def all_gather(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        return None if self.replicated else self._observed(all_gather(groups, self.places))

    def releasing(self, group: ParameterGroup, region: str) -> Callable[[], None]:
        return self.memory.releasing(group, region, self.updated(group))

    def make_whole(self) -> None:
        if self.program.zero == 3 and not self.replicated:
            self._all_parameters.finish()

    @cached_property
    def _all_parameters(self) -> Exchange:
        return self._observed(all_gather(self.program.groups, self.places))

    def _whole(self, group: ParameterGroup, member: Member, region: str) -> Tensor | None:
        if self.replicated:
            return super()._whole(group, member, region)
        own = {self.replica: self.memory.region(group, region)}
        return collect(self.places.communicator, own, self.slices[group.name], member)

    def _observed(self, communication: C) -> C:
        self.observed.append(communication)
        return communication


def parameter_server(memory: DeviceMemory, roles: Roles, communicator: Communicator, wire: Wire) -> Host:
    """Sync by parameter servers. `memory`: of this rank's replica, or of a server without one, with the parameters."""
    program, rank, (first, *_), last = memory.program, communicator.rank, roles.servers, roles.servers[-1]
    of_servers, nothing = slices_of(program, len(roles.servers)), [(0, 0)]
    before, after = nothing * first, nothing * (communicator.world_size - 1 - last)  # servers are neighbouring ranks
    slices = {name: [*before, *served, *after] for name, served in of_servers.items()}
    works, kept = rank in roles.workers, memory
    if works and rank in roles.servers:  # host memory with the layout and the initial parameters of the device
        kept = DeviceMemory.private(program)
        for group in program.groups:
            kept.region(group, "parameter").copy_(memory.region(group, "parameter"))
    places = Places(communicator, roles.workers, slices, memory if works else None, kept, wire)
    who = f"parameter server: rank {first}" + (", which also works" if roles.servers == (0,) else "")
    if first < last:
        who = f"parameter servers: ranks {first} to {last}"
    host = Host(places)
    host.title = f"host ({who})"
    return host


@final
class _GlooAllReduce(Communication):
    def __init__(self, sync: Host, groups: Sequence[ParameterGroup]) -> None:
        gradients = [sync.memory.region(group, "gradient") for group in groups]
        self._staged = [(gradient, torch.empty_like(gradient)) for gradient in gradients]
        self._sync = sync
        self._under_way: list[dist.Work] = []

    def begin(self, *operands: object) -> None:
        with gloo_errors():
            self._under_way = [self._start(device, host) for device, host in self._staged]

    def finish(self) -> None:
        """Raises PeerError if a rank has died or exceeds the process group's timeout."""
        sync, moved = self._sync, self._sync.bytes_moved
        with gloo_errors():
            for work, (device, host) in zip(self._under_way, self._staged, strict=True):
                work.wait()
                device.copy_(host.div_(sync.replicas))
        staged_bytes = sum(host.nbytes for _, host in self._staged)
        moved.device_to_host += staged_bytes
        moved.host_to_device += staged_bytes
        # Received in gloo's ring, which gloo does not report: by all ranks together 2 (N - 1) times the size.
        total = 2 * (sync.replicas - 1) * staged_bytes
        moved.network += (sync.replica + 1) * total // sync.replicas - sync.replica * total // sync.replicas

    @span(Track.COPIES, "device to host", lambda self, device, host: {"bytes": host.nbytes})
    def _start(self, device: Tensor, host: Tensor) -> dist.Work:
        host.copy_(device)
        work: dist.Work = dist.all_reduce(host, async_op=True)
        return work
