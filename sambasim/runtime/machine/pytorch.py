"""PyTorch in this process: repeatable runs, with one number of threads, deterministic kernels and seeds for all random
numbers; and `torch.distributed` with gloo, for the user's code and `--host-sync gloo`, at a free port that rank 0
broadcasts by MPI."""

import atexit
import fcntl
import hashlib
import os
import random
import re
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import StrEnum

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from sambasim.errors import MachineError, PeerError
from sambasim.runtime.machine.communicator import Communicator

_CONNECT_S = 30.0
_LOOPBACK = "127.0.0.1"
_INTERFACE_KEY = "GLOO_SOCKET_IFNAME"
_TRANSPORT_KEY = "GLOO_DEVICE_TRANSPORT"
_SIOCGIFADDR = 0x8915  # of netdevice(7): the IPv4 address of an interface
_ANY_OUTSIDE_ADDRESS = ("192.0.2.1", 9)  # reserved for documentation (RFC 5737); connecting a UDP socket sends nothing
_SOURCE_LINE = re.compile(r"^(\[enforce fail at \S+\] .*?\. |\[\S+\] ?)")  # of C++, and the condition that fails


def make_repeatable(threads: int) -> None:
    """Use `threads` intra-op threads and deterministic kernels in this process from now on."""
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("warn")  # `use_deterministic_algorithms` would import a compiler, in seconds
    torch._C._set_deterministic_fill_uninitialized_memory(False)  # a pass over every tensor


@contextmanager
def repeatable(threads: int) -> Iterator[None]:
    """`make_repeatable` within a block; restores torch's settings afterwards."""
    before = torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    make_repeatable(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_deterministic_debug_mode(mode)
        torch._C._set_deterministic_fill_uninitialized_memory(fills)


class Stream(StrEnum):
    """What random numbers are used for. Streams are independent of one another."""

    SOURCE = "source"  # opening the data, the same on every rank
    DATA = "data"
    GRAPH = "graph"
    WORKER = "worker"


def derive(seed: int, rank: int, step: int, micro_step: int, stream: Stream) -> int:
    """A seed: a function of these alone."""
    text = f"{seed} {rank} {step} {micro_step} {stream}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_torch(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def seed_everything(seed: int) -> None:
    """Seed torch, numpy and random, which the code of a dataset may use."""
    seed_torch(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def bring_up(communicator: Communicator, timeout_s: float = 300.0) -> None:
    """Collective. Initialize the default process group, whose collectives wait `timeout_s` for a peer. Raises
    MachineError if the ranks cannot reach each other."""
    timeout = timedelta(seconds=timeout_s)
    one_host = len(set(communicator.all_gather_object(communicator.host_name))) == 1
    if one_host and (loopback := [name for _, name in socket.if_nameindex() if name.startswith("lo")]):
        # Needs no network. The variable stays set: gloo reads it for each group.
        os.environ.setdefault(_INTERFACE_KEY, loopback[0])
    server, address = None, _LOOPBACK
    if communicator.rank == 0:
        server = dist.TCPStore(_LOOPBACK, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        address = _LOOPBACK if one_host else _outside_address(communicator.host_name)
    host, port = communicator.broadcast_object((address, server.port) if server else None)
    where = f"rank {communicator.rank} on host {communicator.host_name}, store at {host}:{port}"
    # Before torch tries it, which prints the C++ frames of each attempt.
    communicator.raise_first(_obstacle(host, port, min(_CONNECT_S, timeout_s), where))
    hook = sys.excepthook
    try:
        store = server or dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        dist.init_process_group(
            "gloo", store=store, rank=communicator.rank, world_size=communicator.world_size, timeout=timeout
        )
        # Torch's own hook prints only after ours returns, and ours may end the process.
        sys.excepthook = hook
    except (RuntimeError, ValueError) as error:
        raise _not_connected(_reason(error), where) from error
    # A rank that ends early would close its connections while others still make theirs.
    communicator.barrier()


def _obstacle(host: str, port: int, timeout_s: float, where: str) -> MachineError | None:
    """Why gloo cannot start on this rank, whose process group has its store at `host` and `port`."""
    known = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(_INTERFACE_KEY, "").split(",")):
        if name not in known:
            return _not_connected(f"{_INTERFACE_KEY} is {name}, and the interfaces are {', '.join(known)}", where)
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        return _not_connected(f"no connection to rank 0: {error.strerror or error}", where)
    return None


def _not_connected(why: str, where: str) -> MachineError:
    remedy = f"name the network interface that connects the hosts: {_INTERFACE_KEY}=eth0 mpirun …"
    if (transport := os.environ.get(_TRANSPORT_KEY)) is not None:
        remedy = f"unset {_TRANSPORT_KEY}, which is {transport}; or {remedy}"
    return MachineError(f"torch.distributed cannot connect the ranks: {why}", where=where, remedy=remedy)


@contextmanager
def gloo_errors(*, all_errors: bool = True) -> Iterator[None]:
    """Raises PeerError for what torch.distributed raises if a rank dies or is late; without `all_errors`, for what gloo
    raises only."""
    try:
        yield
    except RuntimeError as error:
        if not (all_errors or "/gloo/" in str(error)):
            raise
        raise PeerError(
            f"a collective of torch.distributed failed: {_reason(error)}",
            remedy="read what the other ranks printed last; if they run on, check the network between the hosts",
        ) from error


def _reason(error: Exception) -> str:
    """The first sentence of an error of torch.distributed, without the line of C++ that raised it."""
    return _SOURCE_LINE.sub("", str(error).split("\n")[0]).split(". This is typically")[0]


def bring_up_on_demand(connect: Callable[[], Communicator | None]) -> None:
    """Initialize the default process group when `torch.distributed` first needs it, if `connect` returns a
    communicator."""
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


def _outside_address(host_name: str) -> str:
    """The address by which other hosts reach this one: of the interface that the user has named, of the one to the
    outside, or the name's."""
    name = os.environ.get(_INTERFACE_KEY, "").split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with suppress(OSError):  # none of this name, or with an IPv6 address only
            request = struct.pack("256s", name.encode())
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
        try:
            probe.connect(_ANY_OUTSIDE_ADDRESS)
        except OSError:
            return host_name
        return str(probe.getsockname()[0])
