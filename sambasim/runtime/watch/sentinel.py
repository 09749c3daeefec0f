"""Who watches where no watchdog does: a small process beside each rank.

start    While MPI starts, a rank hangs in C if another does not come, and no thread of it can run. So the rank forks
         before. What it forks looks at the other ranks of its host, which are the other children of the launcher's
         process. If the rank ends before, shared memory that MPI was about to set up has nobody to take its names away:
         then the sentinel does.
middle   There are a board and watchdogs, and the sentinel rests.
end      When a rank has done everything, MPI must end too, where a rank hangs again if another does not come; and then
         nobody waits for it but the launcher, which does so for ever. The sentinel ends its rank if that is stopped, or
         if another has died and cannot have been done: its line on the board says so.
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
from sambasim.runtime.watch import board
from sambasim.runtime.watch.processes import Process, began_at, state_of
from sambasim.units import format_seconds

_REST = b"r"
_SEE_OFF = b"s"
_LOOK_S = 0.25
_REST_S = 2.0

_AFTER_OTHERS_S = 2.0
"""At the end, watchdogs of other ranks may still look: they come first."""

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
    """The process that watches, as its rank speaks to it. It ends when the rank does."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe  # the end of the rank closes it

    def rest(self) -> None:
        """Others watch from now on."""
        self._say(_REST)

    def see_off(self, board: Path | None) -> None:
        """This rank has done everything, and is about to leave: from now on, nobody else looks at it. `board` is the
        one of its node."""
        self._say(_SEE_OFF + os.fsencode(board or ""))

    def _say(self, word: bytes) -> None:
        with suppress(OSError):  # somebody may have ended it
            os.write(self._pipe, word)


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
        return Sentinel(pipe)
    try:
        os.close(pipe)
        os.setsid()  # launchers kill a rank's whole group of processes, and this one has names to take away then
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)  # who sends them to every process means the rank, which answers
        _Keeper(ends, rank_pid, parent, timeout_s, tell).keep()
    finally:
        os._exit(0)


def cause(siblings: Sequence[Sibling], since_s: Mapping[int, float], timeout_s: float, doing: str) -> PeerError | None:
    """The error for ranks that are stopped, or gone, for longer than they may be; `since_s` says by process for how
    long. None if there are none."""
    for sibling in siblings:
        for_s, state = since_s.get(sibling.pid, 0.0), sibling.state
        where = f"rank {sibling.rank} (process {sibling.pid}): {doing}"
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


class _Keeper:
    """What the sentinel's process does for its rank, until that ends, or is ended here."""

    def __init__(
        self, ends: int, rank_pid: int, parent: int, timeout_s: float, tell: Callable[[PeerError, int], None]
    ) -> None:
        self._ends = ends
        self._rank_pid = rank_pid
        self._parent = parent
        self._timeout_s = timeout_s
        self._tell = tell
        self._began = began_at(rank_pid)
        self._seen: dict[int, Sibling] = {}

    def keep(self) -> None:
        word = self._at_start()
        while word == _REST and self._is_there():
            if select.select([self._ends], [], [], _REST_S)[0]:
                word = os.read(self._ends, 1)
        if word == _SEE_OFF:
            self._at_end(Path(os.fsdecode(os.read(self._ends, select.PIPE_BUF))))

    def _at_start(self) -> bytes:
        """Returns the rank's next word, or nothing if it ends before others watch."""
        away = _Away()
        segments: set[Path] = set()
        while not self._is_spoken_to():
            self._look_for_siblings()
            segments |= _segments(self._seen)
            siblings = list(self._seen.values())
            if self._has_ended(cause(siblings, away.since_s(siblings), self._timeout_s, "starting")):
                break
        else:
            if (word := os.read(self._ends, 1)) == _REST:
                self._look_for_siblings()  # all have come here, maybe before the first look
                return word
        shared_memory.unlink(segments | _segments(self._seen))
        return b""

    def _at_end(self, path: Path) -> None:
        away, doing = _Away(), "done, and about to end"
        while not self._is_spoken_to() and self._is_there():
            unfinished = _unfinished(path)
            left = [s for s in self._seen.values() if s.rank in unfinished or s.state is Process.STOPPED]
            found = cause(left, away.since_s(left), self._timeout_s + _AFTER_OTHERS_S, doing)
            if self._has_ended(found):
                return

    def _has_ended(self, found: PeerError | None) -> bool:
        """Whether a rank was ended for what was found: the one that is stopped, or else this one, which hangs in MPI.
        The launcher ends the others with it."""
        own = self._seen.get(self._rank_pid)
        at_work = [one.rank for one in self._seen.values() if one.state is Process.THERE]
        if found is None or own is None or own.rank != min(at_work, default=own.rank):
            return False
        self._tell(found, own.rank)
        stopped = [one for one in self._seen.values() if one.rank == found.rank and one.state is Process.STOPPED]
        os.kill(stopped[0].pid if stopped else own.pid, signal.SIGKILL)
        return True

    def _look_for_siblings(self) -> None:
        self._seen |= {one.pid: one for one in _children(self._parent) if one.pid not in self._seen}

    def _is_spoken_to(self) -> bool:
        """Whether the rank says something, or has ended, in the time between two looks."""
        return bool(select.select([self._ends], [], [], _LOOK_S)[0])

    def _is_there(self) -> bool:
        """Whether the rank is: its end closes the pipe, unless a process that it has forked holds it open."""
        return state_of(self._rank_pid, self._began) is not Process.GONE


def _unfinished(path: Path) -> frozenset[int]:
    """The ranks that are still to do something, as the board at `path` says. Where it is gone, there are none."""
    try:
        return frozenset(line.rank for line in board.read(path) if line.state is not board.State.ENDED)
    except (OSError, ValueError):
        return frozenset()


class _Away:
    """Since when processes are not there. Time in which nobody looked does not count: all may have been stopped."""

    def __init__(self) -> None:
        self._since_s: dict[int, float] = {}
        self._looked_s = time.monotonic()

    def since_s(self, processes: Iterable[Sibling]) -> Mapping[int, float]:
        """By process: for how many seconds it has been seen away."""
        now = time.monotonic()
        passed_s, self._looked_s = min(now - self._looked_s, 2 * _LOOK_S), now
        for one in processes:
            if one.state is Process.THERE:
                self._since_s.pop(one.pid, None)
            else:
                self._since_s[one.pid] = self._since_s.get(one.pid, -passed_s) + passed_s
        return self._since_s


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
    ranks = [(pid, _rank_of(pid)) for pid in pids]
    return [Sibling(rank, pid, began_at(pid)) for pid, rank in ranks if rank is not None]


def _rank_of(pid: int) -> int | None:
    """What the launcher has told process `pid` that its rank is; None for one that it has told nothing."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    pairs = (pair.partition(b"=") for pair in raw.split(b"\0"))
    launcher = find_launcher({os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs})
    return None if launcher is None else launcher.rank
