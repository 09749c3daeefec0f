"""`sambasim bench collectives` where one thing is wrong: the name of the fault comes first, then the command's own."""

import sys
from collections.abc import Iterable

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from sambasim.cli.main import main
from sambasim.runtime.machine import node_memory, process
from sambasim.runtime.machine.mpi import MpiCommunicator
from sambasim.runtime.machine.node_memory import Demand
from sambasim.runtime.transports.host import _GlooAllReduce
from sambasim.runtime.transports.window import SmallWindow, WindowReduce
from sambasim.units import KIB


def mpi_multiplies_by_size() -> None:
    """What an all-reduce tested with the same data on every rank would let pass."""

    def multiply(self: MpiCommunicator, send: NDArray[np.float32] | None, receive: NDArray[np.float32]) -> None:
        np.multiply(receive if send is None else send, self.world_size, out=receive)

    MpiCommunicator.all_reduce_sum_for_comparison = multiply  # type: ignore[method-assign]  # the fault


def device_does_nothing() -> None:
    WindowReduce.finish = lambda self: None  # type: ignore[method-assign]  # the fault


def small_device_does_nothing() -> None:
    SmallWindow.reduce = lambda self: None  # type: ignore[method-assign]  # the fault


def host_adds_one_replica_twice_by_gloo() -> None:
    start = _GlooAllReduce._start

    def start_with_double(self: _GlooAllReduce, device: Tensor, host: Tensor) -> dist.Work:
        if dist.get_rank() == 0:
            device.mul_(2)
        return start(self, device, host)

    _GlooAllReduce._start = start_with_double  # type: ignore[method-assign]  # the fault


def little_shared_memory() -> None:
    """Once MPI has started, 100 KiB for all windows of two ranks."""
    check, free_bytes = node_memory.check_demands, 2 * node_memory.MPI_RESERVE_BYTES + 100 * KIB

    def check_with_little(demands: Iterable[Demand], *texts: str) -> None:  # texts: MPI is only starting
        check([demand if texts else demand._replace(free_bytes=free_bytes) for demand in demands], *texts)

    node_memory.check_demands = check_with_little  # type: ignore[assignment]  # the texts stay as they are


def little_memory() -> None:
    """600 KiB for all buffers of two ranks."""
    vars(process)["available_bytes"] = lambda: 600 * KIB


if __name__ == "__main__":
    globals()[sys.argv.pop(1)]()
    main()
