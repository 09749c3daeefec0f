"""Whether a replica's device memory fits: into the device that the PEF was compiled for, and into this machine."""

from collections.abc import Sequence
from pathlib import Path

from sambasim.errors import MachineError
from sambasim.hardware.spec import device_of
from sambasim.pef import PefDocument
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.shared_memory import Demand
from sambasim.units import KIB, format_bytes

_MEMORY = Path("/proc/meminfo")

DEVICES = "the device memory of this node's replicas"
SMALLER = "run with fewer replicas, or compile a smaller model or batch"
"""What is needed, and what helps, where nothing else is said."""


def check_device(document: PefDocument) -> None:
    """Raise MachineError if the device that the PEF names holds less than one replica needs.

    `compile` has checked the same; but a PEF may come from a release that thought the device larger.
    """
    if document.compile_options.get("arch") is None:
        return
    device, needed = device_of(document.compile_options), document.program.device_bytes
    if needed > device.ddr_capacity_bytes:
        raise MachineError(
            f"one replica of this PEF needs {format_bytes(needed)} of device memory, "
            f"but a {device.name} has {format_bytes(device.ddr_capacity_bytes)}",
            remedy="compile it again, with a smaller model or batch or another --arch",
        )


def available_bytes(meminfo: str | None = None) -> int | None:
    """Bytes of memory that this machine can still give, by the text of /proc/meminfo; None where there is none."""
    text = meminfo if meminfo is not None else _MEMORY.read_text() if _MEMORY.exists() else ""
    lines = [line.split() for line in text.splitlines() if line.startswith("MemAvailable:")]
    return int(lines[0][1]) * KIB if lines else None


def check_node_memory(
    communicator: Communicator,
    needed_bytes: int,
    what: str = DEVICES,
    remedy: str = SMALLER,
) -> None:
    """Collective. As `check_memory`, for ranks of which this one takes `needed_bytes` of its own memory."""
    topology = communicator.topology
    own = Demand(topology.node_index, topology.host_name, needed_bytes, available_bytes())
    check_memory(communicator.all_gather_object(own), what, remedy)


def check_memory(
    demands: Sequence[Demand],
    what: str = DEVICES,
    remedy: str = SMALLER,
) -> None:
    """Raise MachineError if the ranks of a node together need more memory than its machine has available.

    demands: one for each rank, the same on every rank, so that all refuse alike. `needed_bytes` is what the rank takes
        of its own memory, as a rule to play the devices of its replicas; `free_bytes` what `available_bytes` says
        where it runs
    what: what is needed, in the error
    """
    for index in sorted({demand.node_index for demand in demands}):
        of_node = [demand for demand in demands if demand.node_index == index]
        needed = sum(demand.needed_bytes for demand in of_node)
        there = min((demand.free_bytes for demand in of_node if demand.free_bytes is not None), default=needed)
        if needed > there:
            raise MachineError(
                f"{what} is {format_bytes(needed)}, and the machine has {format_bytes(there)} of memory available",
                where=f"host {of_node[0].host_name}",
                remedy=remedy,
            )
