"""`torch.distributed` with gloo, for the user's code and `--host-sync gloo`, at a free port that rank 0 broadcasts by
MPI."""

import atexit
import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from sambasim.errors import MachineError
from sambasim.runtime.ranks import Communicator

DEFAULT_TIMEOUT_S = 300.0

_LOOPBACK = "127.0.0.1"
_INTERFACE_KEY = "GLOO_SOCKET_IFNAME"
_ANY_OUTSIDE_ADDRESS = ("192.0.2.1", 9)  # reserved for documentation (RFC 5737); connecting a UDP socket sends nothing


def bring_up(communicator: Communicator, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Collective. Initialize the default process group with the job's ranks; collectives wait `timeout_s` for a peer.
    Raises MachineError if the ranks cannot reach each other."""
    timeout = timedelta(seconds=timeout_s)
    one_host = len(set(communicator.all_gather_object(communicator.host_name))) == 1
    if one_host:
        _use_loopback()
    server = None
    if communicator.rank == 0:
        address = _LOOPBACK if one_host else _outside_address(communicator.host_name)
        server = dist.TCPStore(address, 0, is_master=True, timeout=timeout, wait_for_workers=False)
    host, port = communicator.broadcast_object((server.host, server.port) if server else None)
    hook = sys.excepthook
    try:
        store = server or dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        dist.init_process_group(
            "gloo", store=store, rank=communicator.rank, world_size=communicator.world_size, timeout=timeout
        )
        # Torch's own hook prints only after ours returns, and ours may end the process.
        sys.excepthook = hook
    except (RuntimeError, ValueError) as error:
        raise MachineError(
            f"torch.distributed cannot connect the ranks: {str(error).splitlines()[0]}",
            where=f"rank {communicator.rank} on host {communicator.host_name}, store at {host}:{port}",
            remedy=f"name the network interface that connects the hosts: {_INTERFACE_KEY}=eth0 mpirun …",
        ) from error


def bring_up_on_demand(connect: Callable[[], Communicator | None]) -> None:
    """Initialize the default process group at the first call of `torch.distributed` that needs it, if `connect` returns
    a communicator. Until then the app may create one."""
    ask = distributed_c10d._get_default_group

    def asked() -> dist.ProcessGroup:
        world = None if dist.is_initialized() else connect()
        if world is not None:
            bring_up(world)
            atexit.register(take_down)
        return ask()

    if not hasattr(ask, "asks_sambasim"):
        vars(asked)["asks_sambasim"] = True
        distributed_c10d._get_default_group = asked


def take_down() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _use_loopback() -> None:
    """Let gloo use the loopback interface, so that it needs no network. The variable stays set: gloo reads it for each
    group."""
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        os.environ.setdefault(_INTERFACE_KEY, loopback[0])


def _outside_address(host_name: str) -> str:
    """The address by which other hosts reach this one: that of the interface to the outside, else the name's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ANY_OUTSIDE_ADDRESS)
        except OSError:
            return host_name
        return str(probe.getsockname()[0])
