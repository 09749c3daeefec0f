"""This process: repeatable runs, with one number of threads, deterministic kernels and seeds for all random numbers;
`torch.distributed` with gloo, for the user's code and `--host-sync gloo`, at a free port that rank 0 broadcasts by MPI;
and its share of the machine's memory and cores."""

import atexit
import ctypes
import fcntl
import hashlib
import os
import random
import re
import resource
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import StrEnum
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from sambasim.errors import MachineError, PeerError
from sambasim.hardware.budget import available_bytes
from sambasim.hardware.spec import arch_of, load_device
from sambasim.pef import PefDocument
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.launcher import cores_of_this_process
from sambasim.runtime.machine.node_memory import Demand, check_demands
from sambasim.units import KIB, format_bytes

_LOOPBACK = "127.0.0.1"
INTERFACE_KEY = "GLOO_SOCKET_IFNAME"
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
    before, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
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
    ORDER = "order"
    DATA = "data"
    GRAPH = "graph"
    WORKER = "worker"
    CALLBACK = "callback"


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
        os.environ.setdefault(INTERFACE_KEY, loopback[0])
    server, place = None, None
    if communicator.rank == 0:
        address, interface = (_LOOPBACK, _LOOPBACK) if one_host else outside_address(communicator.host_name)
        # The store has no authentication, and by itself it would listen on all interfaces.
        listener = socket.create_server((interface, 0))
        place, own = (address, listener.getsockname()[1]), interface or _LOOPBACK
        with silent(2):  # c10d warns of every address that no DNS has a name for
            server = dist.TCPStore(
                own, place[1], None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
            )
    host, port = communicator.broadcast_object(place)
    where = f"rank {communicator.rank} on host {communicator.host_name}, store at {host}:{port}"
    # Before torch tries it, which prints the C++ frames of each attempt.
    with communicator.alike():
        _check_reachable(host, port, min(30.0, timeout_s), where)
    hook = sys.excepthook
    try:
        with silent(2):
            store = server or dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        # The store ends with rank 0, should gloo not start there.
        communicator.barrier()
        rank, world_size = communicator.rank, communicator.world_size
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        # Torch's own hook prints only after ours returns, and ours may end the process.
        sys.excepthook = hook
    except (RuntimeError, ValueError) as error:
        raise _not_connected(_reason(error), where) from error
    # A rank that ends early would close its connections while others still make theirs.
    communicator.barrier()


@contextmanager
def silent(*descriptors: int) -> Iterator[None]:
    """Discards what is printed to `descriptors` within, also by C++."""
    before, devnull = [os.dup(number) for number in descriptors], os.open(os.devnull, os.O_WRONLY)
    for number in descriptors:
        os.dup2(devnull, number)
    try:
        yield
    finally:
        for kept, number in zip(before, descriptors, strict=True):
            os.dup2(kept, number)
            os.close(kept)
        os.close(devnull)


def _check_reachable(host: str, port: int, timeout_s: float, where: str) -> None:
    """Raises MachineError if gloo cannot start on this rank, whose process group has its store at `host` and `port`."""
    known = [name for _, name in socket.if_nameindex()]
    for name in filter(None, os.environ.get(INTERFACE_KEY, "").split(",")):
        if name not in known:
            raise _not_connected(f"{INTERFACE_KEY} is {name}, and the interfaces are {', '.join(known)}", where)
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        raise _not_connected(f"no connection to rank 0: {error.strerror or error}", where) from error


def _not_connected(why: str, where: str) -> MachineError:
    remedy = f"name the network interface that connects the hosts: {INTERFACE_KEY}=eth0 mpirun …"
    if (transport := os.environ.get(_TRANSPORT_KEY)) is not None:
        remedy = f"unset {_TRANSPORT_KEY}, which is {transport}; or {remedy}"
    return MachineError(f"torch.distributed cannot connect the ranks: {why}", where=where, remedy=remedy)


@contextmanager
def gloo_errors(*, all_errors: bool = True) -> Iterator[None]:
    """Raises PeerError for errors of torch.distributed; without `all_errors`, for those of gloo only."""
    try:
        yield
    except RuntimeError as error:
        if not (all_errors or "/gloo/" in str(error)):
            raise
        remedy = "read what the other ranks printed last; if they run on, check the network between the hosts"
        raise PeerError(f"a collective of torch.distributed failed: {_reason(error)}", remedy=remedy) from error


def _reason(error: Exception) -> str:
    """The first sentence of an error of torch.distributed, without the line of C++ that raised it."""
    return _SOURCE_LINE.sub("", str(error).split("\n")[0]).split(". This is typically")[0]


def bring_up_on_demand(connect: Callable[[], Communicator | None]) -> None:
    """Initialize the default process group when it is first needed, if `connect` returns a communicator."""
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


def outside_address(host_name: str) -> tuple[str, str]:
    """The address by which other hosts reach this one, of the interface that the user has named, or to the outside; and
    that to listen on, all ("") if only the name of the host is known."""
    name = os.environ.get(INTERFACE_KEY, "").split(",")[0]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        with suppress(OSError):  # none of this name, or with an IPv6 address only
            request = struct.pack("256s", name.encode())
            return (address := socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])), address
        try:
            probe.connect(_ANY_OUTSIDE_ADDRESS)
        except OSError:
            return host_name, ""
        return (address := str(probe.getsockname()[0])), address


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # mallopt(3)
_LARGEST_MMAP_THRESHOLD = 32 << 20  # the maximum of glibc
_NEVER = 2**31 - 1
_PR_SET_THP_DISABLE = 41  # of prctl(2)


def keep_freed_memory(*, of_any_size: bool = False) -> None:
    """Let glibc keep freed memory in this process, so that pages are not faulted in again in every step. With that
    `of_any_size`, training GPT-2 small holds a quarter more."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_TRIM_THRESHOLD, _NEVER)
        mallopt(*((_M_MMAP_MAX, 0) if of_any_size else (_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)))


def peak_memory_bytes() -> int:
    """The most memory that this process has had since it began: its own, of files, and shared with others."""
    # Not ru_maxrss, which begins with the memory of the process that started this one.
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * KIB if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB


def use_small_pages() -> None:
    """No huge pages in this process from now on: making room for one takes milliseconds, too much for short uses."""
    ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)


def check_device(document: PefDocument) -> None:
    """Raises MachineError if the device that the PEF names has less memory than one replica needs."""
    if document.compile_options.get("arch") is None:
        return
    device, needed = load_device(arch_of(document.compile_options)), document.program.device_bytes
    if needed > device.ddr_capacity_bytes:
        what = f"one replica of this PEF needs {format_bytes(needed)} of device memory"
        has = f"a {device.name} has {format_bytes(device.ddr_capacity_bytes)}"
        remedy = "compile it again, with a smaller model or batch or another --arch"
        raise MachineError(f"{what}, but {has}", remedy=remedy)


def check_node_memory(
    communicator: Communicator,
    needed_bytes: int,
    what: str = "the device memory of this node's replicas",
    remedy: str = "run with fewer replicas, or compile a smaller model or batch",
) -> None:
    """Collective. Raises MachineError about `what` if the ranks of a node need more memory than is available there."""
    demand = Demand(communicator.node_index, communicator.host_name, needed_bytes, available_bytes())
    text = f"{what} is {{}}, and the machine has {{}} of memory available"
    check_demands(communicator.all_gather_object(demand), text, remedy)


def default_threads(communicator: Communicator, replicas_here: int, environ: Mapping[str, str] = os.environ) -> int:
    """Collective. Intra-op threads of a rank, the same on all: OMP_NUM_THREADS, which `check_job` has compared, or a
    node's cores by replicas."""
    text = environ.get("OMP_NUM_THREADS", "")
    if text.isdecimal() and int(text):
        return int(text)
    cores = communicator.all_gather_object(cores_of_this_process())
    nodes = [[cores[r] for r, index in enumerate(communicator.node_of) if index == n] for n in {*communicator.node_of}]
    return max(1, min(len(frozenset().union(*of_ranks)) // (len(of_ranks) * replicas_here) for of_ranks in nodes))
