"""Sync through the host by gloo, `torch.distributed`'s own all-reduce for CPUs, as DistributedDataParallel uses it.

    REDUCE   device -> host: all gradients;  gloo: the sum of all replicas to every rank, which divides it;
             host -> device: all mean gradients
    GATHER   nothing: every rank updates all parameters

gloo adds in an order of its own, so the bits are not those of the other paths. They are the same on every rank: each
piece goes round a ring to be added up, and the sum goes round once more.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sambasim.errors import PeerError
from sambasim.ir.program import Program
from sambasim.records.trace import Track
from sambasim.runtime.arguments import Arguments
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.optimizers import Optimizers
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.sync.everybody import EverybodySync
from sambasim.runtime.trace.watched import Args, Watched

EXEMPT = "gloo adds gradients in an order of its own, so the bits are not those of other sync paths"


class GlooSync(EverybodySync):
    """The default process group of `torch.distributed` must be up, with the ranks of `communicator`."""

    def __init__(
        self,
        program: Program,
        arguments: Arguments,
        optimizers: Optimizers,
        memory: DeviceMemory,
        communicator: Communicator,
    ) -> None:
        super().__init__(program, arguments, optimizers, memory, communicator)
        gradients = [memory.region(group, "gradient") for group in program.groups]
        self._staged = [(gradient, torch.empty_like(gradient)) for gradient in gradients]

    @property
    def title(self) -> str:
        return "host (device to host, gloo, host to device)"

    def reduce(self) -> None:
        """Raises PeerError if a rank is gone, or does not answer before the process group's timeout."""
        try:
            under_way = [self._begin(device, host) for device, host in self._staged]
            for work, (device, host) in zip(under_way, self._staged, strict=True):
                work.wait()
                device.copy_(host.div_(self.divisor))
        except RuntimeError as error:
            raise PeerError(f"gloo's all_reduce did not end: {str(error).splitlines()[0]}") from error
        staged_bytes = sum(host.nbytes for _, host in self._staged)
        self.bytes_moved.device_to_host += staged_bytes
        self.bytes_moved.host_to_device += staged_bytes
        self.bytes_moved.network += self._ring_bytes(staged_bytes)

    def transfers(self) -> Sequence[Watched]:
        """gloo works in threads of its own: what it does meanwhile, and the copies back, are all of the rest."""
        return [Watched(self, "_begin", Track.COPIES, "device to host", _staged_bytes)]

    @staticmethod
    def _begin(device: Tensor, host: Tensor) -> dist.Work:
        host.copy_(device)
        work: dist.Work = dist.all_reduce(host, async_op=True)
        return work

    def _ring_bytes(self, size_bytes: int) -> int:
        """What arrives on this rank when gloo's ring reduces so much: gloo does not tell, but its algorithm does.

        Over all ranks it is 2 (N - 1) times the size; the shares here add up to that.
        """
        topology = self._communicator.topology
        total, size = 2 * (topology.world_size - 1) * size_bytes, topology.world_size
        return (topology.rank + 1) * total // size - topology.rank * total // size


def _staged_bytes(work: dist.Work, device: Tensor, host: Tensor) -> Args:
    return {"bytes": host.nbytes}
