"""Who watches before there is a board: a small process beside each rank, while the ranks find each other.

While MPI starts, a rank hangs in C if another does not come, and no thread of it can run. So the rank forks before.
What it forks looks at the other ranks of its host, which are the other children of the launcher's process. It goes when
the rank says so. If the rank ends before, shared memory that MPI was about to set up has nobody to take its names away:
then the sentinel does.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sambasim.errors import PeerError, StallError
from sambasim.runtime import shared_memory
from sambasim.runtime.launcher import find_launcher
from sambasim.runtime.watch.processes import Process, began_at, state_of
from sambasim.units import format_seconds

_OVER = b"."
_LOOK_S = 0.25

_DEATH_S = 4.0
"""The launcher ends the others within moments. A rank that is gone for so long has not been noticed by it."""


@dataclass(frozen=True, slots=True)
class Sibling:
    """A rank of this host: its number, its process, and when that began."""

    rank: int
    pid: int
    began: bytes | None

    @property
    def state(self) -> Process:
        return state_of(self.pid, self.began)


class Sentinel:
    """The process that watches. `over` ends it; so does the end of the rank, which leaves it to clean up."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid = pid
        self._pipe = pipe

    def over(self) -> None:
        """Others watch from now on."""
        if self._pipe >= 0:
            os.write(self._pipe, _OVER)
            os.close(self._pipe)
            os.waitpid(self._pid, 0)
            self._pipe = -1


def post(environ: Mapping[str, str], timeout_s: float, tell: Callable[[PeerError, int], None]) -> Sentinel | None:
    """Begin to watch the ranks that a launcher has started on this host; None for a process started by hand.

    timeout_s: how long a rank may be stopped
    tell: prints an error, as seen by the rank of this number; called in a process of its own

    To be called before there is a thread, and before MPI starts.
    """
    launcher = find_launcher(environ)
    if launcher is None or launcher.world_size == 1 or not hasattr(os, "fork"):
        return None
    rank_pid, parent = os.getpid(), os.getppid()
    ends, pipe = os.pipe()
    pid = os.fork()
    if pid:
        os.close(ends)
        return Sentinel(pid, pipe)
    try:
        os.close(pipe)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)  # sent to the group of processes; the rank answers to them
        _keep(ends, rank_pid, parent, timeout_s, tell)
    finally:
        os._exit(0)


def cause(siblings: Sequence[Sibling], since_s: Mapping[int, float], timeout_s: float) -> PeerError | None:
    """The error for ranks that are stopped, or gone, for longer than they may be; `since_s` says by process for how
    long. None if there are none."""
    for sibling in siblings:
        for_s, state = since_s.get(sibling.pid, 0.0), sibling.state
        where = f"rank {sibling.rank} (process {sibling.pid}): starting"
        if state is Process.STOPPED and for_s >= timeout_s:
            return StallError(
                f"rank {sibling.rank} keeps the others waiting, for {format_seconds(timeout_s)} now",
                where=f"{where}; its process is stopped",
                remedy="find who stopped it (a debugger, Ctrl-Z, a batch system); --sync-timeout SECONDS waits longer",
                rank=sibling.rank,
            )
        if state is Process.GONE and for_s >= _DEATH_S:
            return PeerError(
                f"rank {sibling.rank} died without a word",
                where=where,
                remedy="what ends a process in silence: os._exit in its code, a crash in a library, a lack of memory",
                rank=sibling.rank,
            )
    return None


def _keep(ends: int, rank_pid: int, parent: int, timeout_s: float, tell: Callable[[PeerError, int], None]) -> None:
    """Look until the rank says that it is over, or ends; or until there is a cause to end it."""
    seen: dict[int, Sibling] = {}
    away_at: dict[int, float] = {}
    segments: set[Path] = set()
    while not select.select([ends], [], [], _LOOK_S)[0]:
        seen |= {one.pid: one for one in _children(parent) if one.pid not in seen}
        segments |= _segments(seen)
        own = seen[rank_pid].rank if rank_pid in seen else None
        now = time.monotonic()
        for one in seen.values():
            if one.state is Process.THERE:
                away_at.pop(one.pid, None)
            else:
                away_at.setdefault(one.pid, now)
        found = cause(list(seen.values()), {pid: now - at for pid, at in away_at.items()}, timeout_s)
        at_work = [one.rank for one in seen.values() if one.state is Process.THERE]
        if found is not None and own is not None and at_work and own == min(at_work):
            tell(found, own)
            os.kill(rank_pid, signal.SIGKILL)  # it hangs in MPI; the launcher ends the others with it
            break
    else:
        if os.read(ends, 1) == _OVER:
            return
    shared_memory.unlink(segments | _segments(seen))


def _segments(siblings: Iterable[int]) -> frozenset[Path]:
    """The named shared memory that these processes have mapped."""
    found: frozenset[Path] = frozenset()
    for pid in siblings:
        with suppress(OSError):
            found |= shared_memory.names_in(Path(f"/proc/{pid}/maps").read_text(errors="replace"))
    return found


def _children(parent: int) -> list[Sibling]:
    """The ranks among the children of the launcher's process."""
    try:
        pids = [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []
    found = []
    for pid in pids:
        try:
            raw = Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            continue
        pairs = (pair.partition(b"=") for pair in raw.split(b"\0"))
        launcher = find_launcher({os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs})
        if launcher is not None:
            found.append(Sibling(launcher.rank, pid, began_at(pid)))
    return found
