"""The shared memory of this node, /dev/shm: how much is free, whether a window can be created, and unlinking its files.
Names are removed once all ranks have mapped them, so that the memory is freed however the processes end."""

import errno
import mmap
import os
import resource
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sambasim.errors import MachineError
from sambasim.units import MIB, format_bytes

MPI_RESERVE_BYTES = 5 * MIB
"""What MPI uses for each rank of a node while it runs; measured, see docs/operations.md."""

MPI_START_BYTES = 12 * MIB
"""What MPI uses in addition while it starts, once for each node. With less, it crashes or stops sharing memory."""

FOLDER = Path("/dev/shm")
_LARGER = f"make {FOLDER} larger (docker: --shm-size; elsewhere: mount -o remount,size=SIZE {FOLDER})"
_SMALLER = f"{_LARGER}, or run with fewer replicas or a smaller batch"
_TOO_LITTLE = f"the replicas of this node need {{}} of shared memory, and {FOLDER} has {{}} free"
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class Demand:
    """The bytes that one rank needs, and those that are free on its node; None if unknown."""

    node_index: int
    host_name: str
    needed_bytes: int
    free_bytes: int | None


@dataclass(slots=True)
class Promised:
    """The bytes of shared memory that the windows of this process need, and what was free before the first of them:
    pages count as free until they are touched."""

    bytes: int = 0
    free_before: int | None = None

    @contextmanager
    def more(self, needed_bytes: int) -> Iterator[tuple[int, int | None]]:
        """Promise `needed_bytes`, unless MachineError is raised within. Gives all that is promised then, and what was
        free before."""
        if not self.bytes:
            self.free_before = free_bytes()
        self.bytes += needed_bytes
        try:
            yield self.bytes, self.free_before
        except MachineError:
            self.bytes -= needed_bytes
            raise


def free_bytes() -> int | None:
    """The free bytes of shared memory; None without /dev/shm."""
    if not FOLDER.is_dir():
        return None
    status = os.statvfs(FOLDER)
    return status.f_bavail * status.f_frsize


def names_in(maps: str) -> frozenset[Path]:
    """The named segments in the text of a /proc/PID/maps file: those under /dev/shm whose name still exists."""
    fields = (line.split(maxsplit=5) for line in maps.splitlines())  # the last one is the path, if there is one
    named = (line[5] for line in fields if len(line) > 5)
    return frozenset(Path(name) for name in named if name.startswith(f"{FOLDER}/") and not name.endswith(" (deleted)"))


def mapped_names() -> frozenset[Path]:
    """The named segments that this process has mapped; empty without /proc."""
    return names_in(_MAPS.read_text(encoding="utf-8", errors="surrogateescape")) if _MAPS.exists() else frozenset()


def unlink(names: Iterable[Path]) -> None:
    """Remove the names, if other ranks have not yet; the memory stays as long as a process maps it."""
    for name in names:
        name.unlink(missing_ok=True)


def check_demands(demands: Sequence[Demand], what: str = _TOO_LITTLE, remedy: str = _SMALLER) -> None:
    """Raise MachineError, `what` with both figures, if the ranks of a node together need more than is free."""
    for index in sorted({demand.node_index for demand in demands}):
        of_node = [demand for demand in demands if demand.node_index == index]
        needed = sum(demand.needed_bytes for demand in of_node)
        there = min((demand.free_bytes for demand in of_node if demand.free_bytes is not None), default=needed)
        if needed > there:
            text = what.format(format_bytes(needed), format_bytes(there))
            raise MachineError(text, where=f"host {of_node[0].host_name}", remedy=remedy)


def check_start(ranks: int, host_name: str, there_bytes: int | None) -> None:
    """Raise MachineError if so many ranks of this node cannot start MPI with `there_bytes` of shared memory."""
    needed = ranks * MPI_RESERVE_BYTES + MPI_START_BYTES
    if ranks > 1 and there_bytes is not None and there_bytes < needed:
        raise MachineError(
            f"MPI needs about {format_bytes(needed)} of shared memory to start {ranks} ranks on one node, "
            f"and {FOLDER} has {format_bytes(there_bytes)} free",
            where=f"host {host_name}",
            remedy=_LARGER,
        )


def try_mapping(size_bytes: int) -> str | None:
    """Map that much shared memory without touching it, and unmap it. Returns None, or the error and the limit
    that caused it."""
    if not FOLDER.is_dir():
        return None
    try:
        with tempfile.TemporaryFile(dir=FOLDER) as file:
            os.ftruncate(file.fileno(), size_bytes)
            mmap.mmap(file.fileno(), size_bytes).close()
    except OSError as error:
        return f"{error.strerror}: {_limit(error.errno)}"
    return None


def check_mappings(attempts: Iterable[tuple[str, int, str | None]]) -> None:
    """Raise MachineError if a rank found an obstacle. By rank: host, bytes of its node's window, and the obstacle."""
    for rank, (host_name, needed_bytes, obstacle) in enumerate(attempts):
        if obstacle is not None:
            raise MachineError(
                f"the replicas of this node need a shared window of {format_bytes(needed_bytes)}, "
                f"which rank {rank} cannot map: {obstacle}",
                where=f"host {host_name}",
                remedy="raise what limits it, or run with fewer replicas or a smaller batch",
            )


def window_error(needed_bytes: int, host_name: str, reason: str) -> MachineError:
    """The error for a window that MPI cannot create although the system could."""
    there = free_bytes()
    return MachineError(
        f"MPI cannot create a shared window of {format_bytes(needed_bytes)} for the replicas of this node: "
        f"{reason.splitlines()[0] if reason else 'it does not say why'}"
        + (f" ({FOLDER} has {format_bytes(there)} free)" if there is not None else ""),
        where=f"host {host_name}",
        remedy=f"run without --reduce-on-rdu, or with another MPI; or {_LARGER}",
    )


def _limit(number: int | None) -> str:
    """The limit that this error number refers to, with its value."""
    if number == errno.EFBIG:
        return f"a file may have {format_bytes(resource.getrlimit(resource.RLIMIT_FSIZE)[0])} (ulimit -f)"
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if number == errno.ENOMEM and space != resource.RLIM_INFINITY:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
        return f"its address space has {format_bytes(max(space - used, 0))} left (ulimit -v)"
    return f"{FOLDER} has {format_bytes(free_bytes() or 0)} free"
