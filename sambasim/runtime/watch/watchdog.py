"""The watchdog: a thread of each rank that ends a job that cannot continue.

    death     a process is gone that had not finished its work
    stall     this rank has waited for others for `--sync-timeout` (`options/fields.py`), and no rank that does not wait
              has written anything new for as long; one that starts, and may load PyTorch from a slow disk, has
              `LEAST_LIMIT_S`

A stall is blamed on the ranks whose process is stopped or whose host does not answer; else on those that do not wait;
else on those that are behind. A slow rank that makes progress is no stall. On several nodes, a watchdog whose rank has
waited too long asks those of the other nodes; a node that does not answer is `silent`.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import zip_longest
from types import FrameType

from sambasim.errors import PeerError, StallError
from sambasim.forks import stat_of
from sambasim.ir.mesh import Mesh
from sambasim.runtime.machine.communicator import QUESTION, Communicator
from sambasim.runtime.watch.status_file import STARTING, RankStatus, State, StatusFile
from sambasim.units import format_seconds, numbered
from sambasim.whose_code import PACKAGE, is_users_file

PERIOD_S = 0.25
LEAVING_S = 3.0
"""A failing rank ends the job within about a second. One that died so long ago was not able to."""
WATCHDOG_FIRST_S = 10.0
"""Other timeouts are this much longer than `--sync-timeout`, because the watchdog knows which rank is missing."""
LEAST_LIMIT_S = 60.0
"""The least time in which a rank and MPI may start, and MPI may end: ranks start at different times."""
ANSWER_S = 4.0
"""How long a watchdog waits for answers from other nodes. They normally take one period."""
_LONG_S = 10.0
"""After this time in one activity, or half of what is allowed, a rank writes which line of Python it is in, or that it
waits: communication within a section writes no activity, because it is short and frequent."""

WAIT = "a wait for other ranks"
_COMMUNICATION = tuple(f"{PACKAGE}runtime/{name}" for name in ("transports/", "machine/mpi.py"))
_WHERE_INDENT = "\n         "


class Process(StrEnum):
    RUNNING = "running"
    STOPPED = "stopped"  # by a signal or a debugger
    GONE = "gone"
    SILENT = "silent"  # on another host, which does not answer
    UNKNOWN = "unknown"  # not visible from here, as in another container


_AWAY = {
    Process.STOPPED: "find what stopped it (a debugger, Ctrl-Z, a batch system)",
    Process.SILENT: "check that host and the network to it",
}
"""The processes that cannot make progress, with a remedy."""


def start_time(pid: int | str) -> bytes | None:
    """When process `pid` started, in ticks, to recognize a later one with the same number; None if not visible."""
    return fields[19] if (fields := stat_of(pid)) else None


def process_of(pid: int, started: bytes | None) -> Process:
    """The state of process `pid`, whose `start_time` was `started`."""
    if started is None:
        return Process.UNKNOWN
    fields = stat_of(pid)
    if fields is None or fields[19] != started or fields[0] in b"ZXx":
        return Process.GONE
    return Process.STOPPED if fields[0] in b"Tt" else Process.RUNNING


@dataclass(frozen=True, slots=True)
class Observation:
    """A rank as observed by another: its status, for how long that has not changed, and its process."""

    status: RankStatus
    idle_s: float
    process: Process

    @property
    def waits(self) -> bool:
        return self.status.state is State.WAITING or (self.status.state is State.RUNNING and self.status.at == WAIT)

    @property
    def is_running(self) -> bool:
        """Whether it should make progress without others."""
        return self.status.state is State.RUNNING and not self.waits

    def allowed_s(self, timeout_s: float) -> float:
        """For how long it may write nothing new, where `--sync-timeout` is `timeout_s`."""
        starts = self.status.doing == STARTING and self.process is Process.RUNNING
        return max(timeout_s, LEAST_LIMIT_S) if starts else timeout_s

    @property
    def progress(self) -> tuple[int, int]:
        return self.status.step, self.status.micro_step

    @property
    def place(self) -> str:
        facts = "; ".join(filter(None, [f"process {self.status.pid}" if self.status.pid else "", self.status.mesh]))
        return f"rank {self.status.rank} on {self.status.host_name}{facts and f' ({facts})'}"

    @property
    def last_activity(self) -> str:
        if self.process is Process.SILENT:
            return f"{self.place}: {self.status}"
        stopped = "its process is stopped; " if self.process is Process.STOPPED else ""
        at = f", at {self.status.at}" if self.status.at else ""
        return f"{self.place}: {stopped}{self.status} for {format_seconds(self.idle_s)}{at}"


def observe(
    file: StatusFile, started: Sequence[bytes | None], before: Sequence[Observation] = (), passed_s: float = 0.0
) -> list[Observation]:
    """The ranks of a node, by local rank, as they are `passed_s` after `before`. `started`: the `start_time` of each.
    One call adds little idle time: a process that was stopped, or a machine that slept, did not wait meanwhile."""
    # Processes first, then lines: a process that has exited has written its last line.
    pids = [status.pid for status in file.ranks()]
    processes = [process_of(pid, since) for pid, since in zip(pids, started, strict=True)]
    observed = []
    for status, process, last in zip_longest(file.ranks(), processes, before):
        # `at` is written by the watchdog, so it is no progress.
        is_idle = last is not None and replace(last.status, at="") == replace(status, at="")
        idle_s = last.idle_s + min(passed_s, 4 * PERIOD_S) if is_idle else 0.0
        observed.append(Observation(status, idle_s, process))
    return observed


def dead_ranks(observed: Sequence[Observation]) -> list[Observation]:
    gone = [rank for rank in observed if rank.process is Process.GONE and rank.status.state is not State.ENDED]
    return [rank for rank in gone if rank.status.state is not State.LEAVING or rank.idle_s >= LEAVING_S]


def is_stalled(own: Observation, observed: Sequence[Observation], timeout_s: float) -> bool:
    """Whether `own` has waited too long for ranks that make no progress. `observed` are all ranks, `own` among them."""
    # A rank may wait without having written so. While a process is stopped, an idle rank counts as waiting.
    waits = own.waits or any(rank.process is Process.STOPPED for rank in observed)
    if not waits or own.idle_s < timeout_s:
        return False
    if any(rank.status.state is State.LEAVING for rank in observed):
        return False  # it ends the job itself
    if any(rank.status.state is State.BUSY and rank.process not in _AWAY for rank in observed):
        return False
    others = [rank for rank in observed if rank.is_running or rank.process in _AWAY]
    others = others or [rank for rank in observed if rank.waits]  # perhaps for one that does so only now
    return all(rank.process is Process.SILENT or rank.idle_s >= rank.allowed_s(timeout_s) for rank in others)


def missing_ranks(observed: Sequence[Observation]) -> list[Observation]:
    """The ranks that a stalled job waits for. None if all wait for each other in the same step."""
    away = [rank for rank in observed if rank.process in _AWAY and rank.status.state is not State.ENDED]
    running = [rank for rank in observed if rank.is_running]
    ended = [rank for rank in observed if rank.status.state is State.ENDED]
    last = max(rank.progress for rank in observed)
    return away or running or ended or [rank for rank in observed if rank.progress < last]


def death_error(dead: Sequence[Observation]) -> PeerError:
    first = dead[0].status
    where = _WHERE_INDENT.join(f"{rank.place}: {rank.status}" for rank in dead)
    causes = "os._exit in its code, a crash in a library, the kernel short of memory"
    remedy = f"possible causes: {causes} (on {first.host_name}: dmesg | tail)"
    return PeerError(f"{_names(dead)} died without an error message", where=where, remedy=remedy, rank=first.rank)


def stall_error(observed: Sequence[Observation], timeout_s: float) -> StallError:
    missing = missing_ranks(observed)
    waited = format_seconds(max((rank.allowed_s(timeout_s) for rank in missing), default=timeout_s))
    if missing:
        first = missing[0]
        what = f"{_names(missing)} kept the other ranks waiting for {waited}"
        remedy = "find out why that line does not return" if first.status.at else "find out what that rank does there"
        remedy = _AWAY.get(first.process, remedy)
    else:
        what = f"all ranks have waited for each other for {waited}"
        remedy = "check the network between the hosts"
    where = _WHERE_INDENT.join(rank.last_activity for rank in missing or observed)
    remedy += "; --sync-timeout SECONDS waits longer"
    return StallError(what, where=where, remedy=remedy, rank=missing[0].status.rank if missing else None)


def _names(several: Sequence[Observation]) -> str:
    return numbered("rank", [rank.status.rank for rank in several])


class OtherNodes:
    """Asks and answers the watchdogs of other nodes. `hosts` are the host names by rank, `mesh` is that of the job."""

    def __init__(self, communicator: Communicator, hosts: Sequence[str], mesh: Mesh) -> None:
        self._communicator, self._hosts, self._mesh = communicator, hosts, mesh
        self._answers: dict[int, Observation] = {}

    def answer(self, observed: Sequence[Observation]) -> None:
        """Send `observed` to those who have asked, and keep the answers to own questions. Does not wait."""
        for rank, message in self._communicator.posted(QUESTION):
            if message is None:
                self._communicator.post(tuple(observed), rank, QUESTION)
            else:
                self._answers.update({seen.status.rank: seen for seen in message})

    def ask(self, observed: Sequence[Observation]) -> Sequence[Observation]:
        """The observations of all other nodes, by rank. Meanwhile answers with `observed`."""
        world = self._communicator
        others = [rank for rank, node in enumerate(world.node_of) if node != world.node_index]
        self._answers.clear()
        for rank in others:
            world.post(None, rank, QUESTION)
        until = time.monotonic() + ANSWER_S
        while not self._answers.keys() >= set(others) and time.monotonic() < until:
            time.sleep(0.02)
            self.answer(observed)
        for rank in set(others) - self._answers.keys():
            doing, label = f"no answer for {format_seconds(ANSWER_S)}", self._mesh.label(rank)
            status = RankStatus(rank, self._hosts[rank], 0, 0, 0, State.RUNNING, doing, mesh=label)
            self._answers[rank] = Observation(status, ANSWER_S, Process.SILENT)
        return [self._answers[rank] for rank in others]


@dataclass(eq=False)
class Watchdog:
    """Observes the node from `start` to `stop`. `others`: None on one node; `end_job`, in its thread, never returns."""

    file: StatusFile
    started: Sequence[bytes | None]
    local_rank: int
    timeout_s: float
    others: OtherNodes | None
    end_job: Callable[[PeerError], object]

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sambasim-watchdog", daemon=True)

    def start(self) -> None:
        self._main_thread = threading.get_ident()
        self._thread.start()

    def stop(self, wait_s: float = 0.0) -> None:
        """End the thread. Waits up to `wait_s` for its last observation, which may use MPI."""
        self._stopped.set()
        if wait_s and threading.current_thread() is not self._thread:
            self._thread.join(wait_s)

    def death(self) -> PeerError | None:
        """The error if a rank of the node is dead now."""
        dead = dead_ranks(observe(self.file, self.started))
        return death_error(dead) if dead else None

    def _run(self) -> None:
        observed: Sequence[Observation] = ()
        last_s = time.monotonic()
        while not self._stopped.wait(PERIOD_S):
            now_s = time.monotonic()
            observed, last_s = observe(self.file, self.started, observed, now_s - last_s), now_s
            error = self._error(observed)
            if error is not None and not self._stopped.is_set():
                self.end_job(error)

    def _error(self, observed: Sequence[Observation]) -> PeerError | None:
        own = observed[self.local_rank]
        self._write_line(own)
        if self.others is not None:
            self.others.answer(observed)
        if dead := dead_ranks(observed):
            return death_error(dead)
        if not is_stalled(own, observed, self.timeout_s):
            return None
        if self.others is not None:
            observed = [*observed, *self.others.ask(observed)]
        return stall_error(observed, self.timeout_s) if is_stalled(own, observed, self.timeout_s) else None

    def _write_line(self, own: Observation) -> None:
        if own.status.state is State.RUNNING and own.idle_s >= min(self.timeout_s / 2, _LONG_S):
            frame = sys._current_frames().get(self._main_thread)
            self.file.activity(self.local_rank).at(WAIT if is_wait(frame) else user_line(frame))
        elif own.status.at:
            self.file.activity(self.local_rank).at("")


def is_wait(frame: FrameType | None) -> bool:
    """Whether `frame`, the innermost of a thread, communicates with other ranks."""
    while frame is not None and frame.f_code.co_filename == threading.__file__:  # it waits for another thread
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_COMMUNICATION)


def user_line(frame: FrameType | None) -> str:
    """`FILE:LINE in FUNCTION` of the innermost frame of user code, from `frame` outwards; empty if there is none."""
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else ""
