"""Host sync by gloo, `torch.distributed`'s all-reduce for CPUs, as DistributedDataParallel uses it.

    REDUCE   device -> host: all gradients;  gloo: the sum of all replicas to every rank, which divides it;
             host -> device: all mean gradients
    GATHER   nothing: every rank updates all parameters

gloo adds in its own order, so the bits differ from the other paths. They are the same on every rank: each piece is
summed along a ring, and then the sum is sent along the ring.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from sambasim.collectives.slices import Slice
from sambasim.errors import PeerError
from sambasim.ir.program import Member, ParameterGroup, Program
from sambasim.records.trace import Track
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.observer import SpanArgs, StepObserver, span
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.transports.base import Communication, EndOfStep, Transport, slices_of
from sambasim.runtime.transports.host import GatheredLosses
from sambasim.runtime.transports.values import MessageLine

EXEMPT = "gloo adds gradients in an order of its own, so the bits are not those of other sync paths"


@final
class Gloo(Transport):
    """Needs the default process group of `torch.distributed` with the ranks of `communicator`."""

    def __init__(self, program: Program, memory: DeviceMemory, communicator: Communicator) -> None:
        rank, size = communicator.rank, communicator.world_size
        super().__init__(program, memory, MessageLine(communicator, range(size)), size, rank)
        self.communicator = communicator
        self._slices = slices_of(program, size)

    @property
    def title(self) -> str:
        return "host (device to host, gloo, host to device)"

    def owned(self, group: ParameterGroup) -> Slice:
        return (0, group.numel)

    def share(self, group: ParameterGroup) -> Slice:
        return self._slices[group.name][self.replica]

    def reduce_scatter(self, groups: Sequence[ParameterGroup]) -> Communication:
        return _AllReduce(self, groups)

    def all_gather(self, groups: Sequence[ParameterGroup]) -> Communication | None:
        return None

    def end_step(self) -> EndOfStep:
        return GatheredLosses(self, self.communicator, range(self.replicas))

    def whole_state(self, group: ParameterGroup, member: Member, state: str) -> Tensor | None:
        own = self.memory.region(group, state)[member.start : member.start + member.numel]
        return own if self.replica == 0 else None


@contextmanager
def _as_peer_error() -> Iterator[None]:
    """Raises PeerError for errors of gloo."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"gloo's all_reduce failed: {str(error).splitlines()[0]}") from error


@final
class _AllReduce(Communication):
    def __init__(self, transport: Gloo, groups: Sequence[ParameterGroup]) -> None:
        gradients = [transport.memory.region(group, "gradient") for group in groups]
        self._staged = [(gradient, torch.empty_like(gradient)) for gradient in gradients]
        self._transport = transport
        self._under_way: list[dist.Work] = []
        self.replica = transport.replica

    @property
    def observer(self) -> StepObserver | None:
        return self._transport.observer

    def begin(self, *operands: object) -> None:
        with _as_peer_error():
            self._under_way = [self._start(device, host) for device, host in self._staged]

    def finish(self) -> object:
        """Raises PeerError if a rank has died or exceeds the process group's timeout."""
        moved = self._transport.bytes_moved
        with _as_peer_error():
            for work, (device, host) in zip(self._under_way, self._staged, strict=True):
                work.wait()
                device.copy_(host.div_(self._transport.replicas))
        staged_bytes = sum(host.nbytes for _, host in self._staged)
        moved.device_to_host += staged_bytes
        moved.host_to_device += staged_bytes
        moved.network += self._ring_bytes(staged_bytes)
        return None

    def _bytes(self, device: Tensor, host: Tensor) -> SpanArgs:
        return {"bytes": host.nbytes}

    @span(Track.COPIES, "device to host", _bytes)
    def _start(self, device: Tensor, host: Tensor) -> dist.Work:
        host.copy_(device)
        work: dist.Work = dist.all_reduce(host, async_op=True)
        return work

    def _ring_bytes(self, size_bytes: int) -> int:
        """The bytes that this rank receives in gloo's ring, which gloo does not report.

        All ranks together receive 2 (N - 1) times the size; the shares add up to that.
        """
        rank, size = self._transport.replica, self._transport.replicas
        total = 2 * (size - 1) * size_bytes
        return (rank + 1) * total // size - rank * total // size
