"""Which ranks have died, and whether the job is stalled: decided from the status file and from the process table.

    finding   when
    death     a process is gone that had not finished its work
    stall     this rank has waited for others for the time allowed, and no rank that does not wait has written anything
              new for as long

A stall is blamed on the ranks whose process is stopped or whose host does not answer; else on those that do not wait;
else on those that are behind. A slow rank that makes progress is no stall. A rank that takes longer than allowed for a
single activity, such as one batch or one section, is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from sambasim.errors import PeerError, StallError
from sambasim.runtime.supervision.status_file import RankStatus, State, StatusFile
from sambasim.units import format_seconds

PERIOD_S = 0.25
"""How often each rank observes its node."""

LEAVING_S = 3.0
"""A rank that has failed ends the job within about a second. One that died so long ago did not manage to."""

WATCHDOG_FIRST_S = 10.0
"""Other timeouts are this much longer than `--sync-timeout`, because the watchdog knows which rank is missing."""

_COUNTED_S = 4 * PERIOD_S
_WHERE_INDENT = "\n         "


class Process(StrEnum):
    """What became of the process of a rank."""

    RUNNING = "running"
    STOPPED = "stopped"
    """By a signal or a debugger."""
    GONE = "gone"
    SILENT = "silent"
    """On another host, which does not answer."""
    UNKNOWN = "unknown"
    """Not visible from here, as in another container."""


_AWAY = (Process.STOPPED, Process.SILENT)


def start_time(pid: int | str) -> bytes | None:
    """When process `pid` started, in ticks: it tells the process from a later one with the same number. None if it
    cannot be seen."""
    fields = _stat(pid)
    return None if fields is None else fields[19]


def process_of(pid: int, started: bytes | None) -> Process:
    """What became of process `pid`, whose `start_time` was `started`."""
    if started is None:
        return Process.UNKNOWN
    fields = _stat(pid)
    if fields is None or fields[19] != started or fields[0] in b"ZXx":
        return Process.GONE
    return Process.STOPPED if fields[0] in b"Tt" else Process.RUNNING


def _stat(pid: int | str) -> list[bytes] | None:
    """The fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class Observation:
    """A rank as seen by another: its status, for how long that has not changed, and its process."""

    status: RankStatus
    idle_s: float
    process: Process

    @property
    def waits(self) -> bool:
        return self.status.state is State.WAITING

    @property
    def is_running(self) -> bool:
        """Whether it should make progress without others."""
        return self.status.state is State.RUNNING


class NodeObserver:
    """What one rank sees of its node, once each rank has written its line.

    started: by local rank, the `start_time` of its process; None where it cannot be seen
    """

    def __init__(self, file: StatusFile, started: Sequence[bytes | None]) -> None:
        self._file = file
        self._started = started
        self._last: dict[int, tuple[RankStatus, float]] = {}
        self._last_s: float | None = None

    def observe(self, now_s: float) -> list[Observation]:
        """The state at `now_s`, by local rank.

        Idle time is counted here, so that writers need no clock. One call counts little of it: a process that was
        stopped, or a machine that slept, did not wait for others meanwhile.
        """
        passed_s = 0.0 if self._last_s is None else min(now_s - self._last_s, _COUNTED_S)
        self._last_s = now_s
        # Processes first, then lines: a process that has exited has written its last line.
        pids = [status.pid for status in self._file.ranks()]
        processes = [process_of(pid, started) for pid, started in zip(pids, self._started, strict=True)]
        return [
            Observation(status, self._idle_s(status, passed_s), process)
            for status, process in zip(self._file.ranks(), processes, strict=True)
        ]

    def _idle_s(self, status: RankStatus, passed_s: float) -> float:
        work = replace(status, at="")  # the watchdog writes that, so it is no progress
        before, idle_s = self._last.get(status.rank, (None, 0.0))
        idle_s = idle_s + passed_s if work == before else 0.0
        self._last[status.rank] = work, idle_s
        return idle_s


def dead_ranks(observed: Sequence[Observation]) -> list[Observation]:
    """Those whose process is gone before it finished its work."""
    at_work = (State.RUNNING, State.WAITING, State.BUSY)
    return [
        one
        for one in observed
        if one.process is Process.GONE
        and (one.status.state in at_work or (one.status.state is State.LEAVING and one.idle_s >= LEAVING_S))
    ]


def is_stalled(own: Observation, observed: Sequence[Observation], timeout_s: float) -> bool:
    """Whether `own` has waited too long for ranks that make no progress. `observed` are all ranks, `own` among them.

    A rank does not always say that it waits. While a process is stopped, one that has done nothing new does.
    """
    waits = own.waits or any(one.process is Process.STOPPED for one in observed)
    if not waits or own.idle_s < timeout_s:
        return False
    if any(one.status.state is State.LEAVING for one in observed):
        return False  # it ends the job itself
    if any(one.status.state is State.BUSY and one.process not in _AWAY for one in observed):
        return False
    others = [one for one in observed if one.is_running or one.process in _AWAY]
    if not others:  # all wait, perhaps for one that has just begun to
        others = [one for one in observed if one.waits]
    return all(one.idle_s >= timeout_s or one.process is Process.SILENT for one in others)


def missing_ranks(observed: Sequence[Observation]) -> list[Observation]:
    """The ranks that a stalled job waits for. None if all wait for each other in the same step."""
    away = [one for one in observed if one.process in _AWAY and one.status.state is not State.ENDED]
    running = [one for one in observed if one.is_running]
    ended = [one for one in observed if one.status.state is State.ENDED]
    last = max(_progress(one) for one in observed)
    return away or running or ended or [one for one in observed if _progress(one) < last]


def death_error(dead: Sequence[Observation]) -> PeerError:
    """The error for ranks that have died."""
    first = dead[0].status
    return PeerError(
        f"{_names(dead)} died without an error message",
        where=_WHERE_INDENT.join(f"{_place(one.status)}: {one.status}" for one in dead),
        remedy="possible causes: os._exit in its code, a crash in a library, the kernel short of memory "
        f"(on {first.host_name}: dmesg | tail)",
        rank=first.rank,
    )


def stall_error(observed: Sequence[Observation], timeout_s: float) -> StallError:
    """The error for a job that is stalled."""
    missing = missing_ranks(observed)
    waited = format_seconds(timeout_s)
    if not missing:
        return StallError(
            f"all ranks have waited for each other for {waited}",
            where=_WHERE_INDENT.join(_last(one) for one in observed),
            remedy="check the network between the hosts; --sync-timeout SECONDS waits longer",
        )
    return StallError(
        f"{_names(missing)} kept the other ranks waiting for {waited}",
        where=_WHERE_INDENT.join(_last(one) for one in missing),
        remedy=f"{_remedy(missing[0])}; --sync-timeout SECONDS waits longer",
        rank=missing[0].status.rank,
    )


def _progress(one: Observation) -> tuple[int, int]:
    return one.status.step, one.status.micro_step


def _names(several: Sequence[Observation]) -> str:
    numbers = [str(one.status.rank) for one in several]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _place(status: RankStatus) -> str:
    process = f" (process {status.pid})" if status.pid else ""
    return f"rank {status.rank} on {status.host_name}{process}"


def _last(one: Observation) -> str:
    if one.process is Process.SILENT:
        return f"{_place(one.status)}: {one.status}"
    stopped = "its process is stopped; " if one.process is Process.STOPPED else ""
    at = f", at {one.status.at}" if one.status.at else ""
    return f"{_place(one.status)}: {stopped}{one.status} for {format_seconds(one.idle_s)}{at}"


def _remedy(one: Observation) -> str:
    if one.process is Process.STOPPED:
        return "find what stopped it (a debugger, Ctrl-Z, a batch system)"
    if one.process is Process.SILENT:
        return "check that host and the network to it"
    return "find out why that line does not return" if one.status.at else "find out what that rank does there"
