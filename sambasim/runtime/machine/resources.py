"""The resources of the machine: memory for the replicas' devices, cores for the threads, the C allocator."""

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress

from sambasim.errors import MachineError
from sambasim.hardware.budget import available_bytes
from sambasim.hardware.spec import device_of
from sambasim.pef import PefDocument
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.node_memory import Demand, check_demands
from sambasim.units import format_bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LARGEST_MMAP_THRESHOLD = 32 << 20  # the maximum of glibc
_NEVER = 2**31 - 1
_PR_SET_THP_DISABLE = 41  # of prctl(2)


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory in this process, so that pages are not faulted in again in every step."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(_M_TRIM_THRESHOLD, _NEVER), mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)])


def use_small_pages() -> None:
    """No huge pages in this process from now on: making room for one may take milliseconds, too much for memory that is
    used a few times."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)


def check_device(document: PefDocument) -> None:
    """Raises MachineError if the device that the PEF names has less memory than one replica needs."""
    if document.compile_options.get("arch") is None:
        return
    device, needed = device_of(document.compile_options), document.program.device_bytes
    if needed > device.ddr_capacity_bytes:
        raise MachineError(
            f"one replica of this PEF needs {format_bytes(needed)} of device memory, "
            f"but a {device.name} has {format_bytes(device.ddr_capacity_bytes)}",
            remedy="compile it again, with a smaller model or batch or another --arch",
        )


def check_node_memory(
    communicator: Communicator,
    needed_bytes: int,
    what: str = "the device memory of this node's replicas",
    remedy: str = "run with fewer replicas, or compile a smaller model or batch",
) -> None:
    """Collective. Raises MachineError about `what` if the ranks of a node need more memory than is available there."""
    own = Demand(communicator.node_index, communicator.host_name, needed_bytes, available_bytes())
    text = f"{what} is {{}}, and the machine has {{}} of memory available"
    check_demands(communicator.all_gather_object(own), text, remedy)


def cores_of_this_process() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


def default_threads(communicator: Communicator, replicas_here: int, environ: Mapping[str, str] = os.environ) -> int:
    """Collective. Intra-op threads of a rank, the same on all: OMP_NUM_THREADS, or a node's cores divided by its
    replicas."""
    text = environ.get("OMP_NUM_THREADS", "")
    wanted = int(text) if text.isdecimal() else 0
    everybody = communicator.all_gather_object((communicator.node_index, cores_of_this_process(), wanted))
    if chosen := [threads for _, _, threads in everybody if threads]:
        return min(chosen)
    of_nodes = [[cores for index, cores, _ in everybody if index == node] for node in range(communicator.node_count)]
    return max(1, min(len(frozenset().union(*cores)) // (len(cores) * replicas_here) for cores in of_nodes))
