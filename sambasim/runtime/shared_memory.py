"""The shared memory of this machine: how much is free, and how its names are taken away.

A segment of shared memory is a file under /dev/shm. Once every process that needs it has it mapped, its name can go:
the memory lives on until the last mapping does, and then nothing is left behind, however the processes ended. (MPICH
leaves 2 MB a job behind otherwise when a job is aborted or killed.)
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sambasim.errors import MachineError
from sambasim.units import format_bytes

FOLDER = Path("/dev/shm")
_MAPS = Path("/proc/self/maps")
_MAPS_FIELDS_BEFORE_PATH = 5
_GONE = " (deleted)"


@dataclass(frozen=True, slots=True)
class Demand:
    """What one rank asks for, and what is free where it runs. `free_bytes` is None where nobody can tell."""

    node_index: int
    host_name: str
    needed_bytes: int
    free_bytes: int | None


def free_bytes() -> int | None:
    """Bytes of shared memory that can still be taken here; None where there is no /dev/shm."""
    if not FOLDER.is_dir():
        return None
    status = os.statvfs(FOLDER)
    return status.f_bavail * status.f_frsize


def names_in(maps: str) -> frozenset[Path]:
    """The named segments in the text of a /proc/PID/maps file: those under /dev/shm whose name still exists."""
    paths = (line.split(maxsplit=_MAPS_FIELDS_BEFORE_PATH)[_MAPS_FIELDS_BEFORE_PATH:] for line in maps.splitlines())
    named = (path[0] for path in paths if path)
    return frozenset(Path(name) for name in named if name.startswith(f"{FOLDER}/") and not name.endswith(_GONE))


def mapped_names() -> frozenset[Path]:
    """The named segments that this process has mapped. Empty where there is no /proc."""
    return names_in(_MAPS.read_text()) if _MAPS.exists() else frozenset()


def unlink(names: Iterable[Path]) -> None:
    """Take the names away; the memory stays as long as somebody has it mapped. Peers may have been quicker."""
    for name in names:
        name.unlink(missing_ok=True)


def check_demands(demands: Iterable[Demand]) -> None:
    """Raise MachineError if the ranks of a node together ask for more than is free there. Names the first such node."""
    by_node: dict[int, list[Demand]] = {}
    for demand in demands:
        by_node.setdefault(demand.node_index, []).append(demand)
    for _, of_node in sorted(by_node.items()):
        needed = sum(demand.needed_bytes for demand in of_node)
        there = min((demand.free_bytes for demand in of_node if demand.free_bytes is not None), default=needed)
        if needed > there:
            raise MachineError(
                f"the replicas of this node need {format_bytes(needed)} of shared memory, "
                f"and {FOLDER} has {format_bytes(there)} free",
                where=f"host {of_node[0].host_name}",
                remedy=f"make {FOLDER} larger (docker: --shm-size; elsewhere: mount -o remount,size=SIZE {FOLDER}), "
                "or run with fewer replicas or a smaller batch",
            )
