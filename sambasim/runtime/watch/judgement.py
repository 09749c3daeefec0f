"""Whether a job can still go on, judged by what the ranks say of themselves and for how long they have said it.

    finding   when
    death     a process is gone that had not come to its end
    stall     the judging rank has waited for others for the time that is allowed, and no rank that does not wait has
              done anything new for so long

Of a stall those are named whose process is stopped or whose host gives no answer; else those that do not wait; else
those that are behind.

A rank that is slow and moves is no stall. One that sits in a single thing for longer than is allowed is one: reading
a batch, say, or one section.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sambasim.errors import PeerError, StallError
from sambasim.runtime.watch.board import Line, State
from sambasim.runtime.watch.processes import Process
from sambasim.units import format_seconds

_AWAY = (Process.STOPPED, Process.SILENT)

LEAVING_S = 3.0
"""A rank that has failed ends the job itself within about a second. One that is gone after so long has not done it."""

WATCHDOG_FIRST_S = 10.0
"""What else waits for peers with a limit of its own gets so much longer: it knows neither who is missing nor why."""

_BENEATH = "\n         "
"""What a second line of `where` begins with."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What is seen of a rank: its line, for how long it has not changed, and what became of its process."""

    line: Line
    idle_s: float
    process: Process

    @property
    def moves(self) -> bool:
        """Whether it should come from one thing to the next, without others."""
        return self.line.state is State.RUNNING


def dead(seen: Sequence[Seen]) -> list[Seen]:
    """Those whose process is gone without having come to its end."""
    at_work = (State.RUNNING, State.WAITING, State.BUSY)
    gone = [one for one in seen if one.process is Process.GONE]
    return [one for one in gone if one.line.state in at_work or _was_leaving(one)]


def is_stalled(own: Seen, seen: Sequence[Seen], timeout_s: float) -> bool:
    """Whether `own` has waited for too long, and for others who do nothing. `seen` are all ranks, `own` among them.

    A rank does not say of everything that it waits. Where a process is stopped, one that has done nothing new will do.
    """
    waits = own.line.state is State.WAITING or any(one.process is Process.STOPPED for one in seen)
    if not waits or own.idle_s < timeout_s:
        return False
    if any(one.line.state is State.LEAVING for one in seen):
        return False  # which ends the job by itself
    if any(one.line.state is State.BUSY and one.process not in _AWAY for one in seen):
        return False
    others = [one for one in seen if one.moves or one.process in _AWAY]
    if not others:  # all wait: one that has just come to it may be the one that the rest waited for
        others = [one for one in seen if one.line.state is State.WAITING]
    return all(one.idle_s >= timeout_s or one.process is Process.SILENT for one in others)


def missing(seen: Sequence[Seen]) -> list[Seen]:
    """For whom the others wait, in a job that stands still. Nobody, if all wait for each other in the same step."""
    away = [one for one in seen if one.process in _AWAY and one.line.state is not State.ENDED]
    moving = [one for one in seen if one.moves]
    ended = [one for one in seen if one.line.state is State.ENDED]
    last = max((_progress(one) for one in seen), default=(0, 0))
    behind = [one for one in seen if _progress(one) < last]
    return away or moving or ended or behind


def death(gone: Sequence[Seen]) -> PeerError:
    """The error for ranks that are gone."""
    first = gone[0].line
    names = _names(gone)
    return PeerError(
        f"{names} died without a word",
        where=_BENEATH.join(f"{_place(one.line)}: {one.line}" for one in gone),
        remedy="what ends a process in silence: os._exit in its code, a crash in a library, the kernel short of memory "
        f"(on {first.host_name}: dmesg | tail)",
        rank=first.rank,
    )


def stall(seen: Sequence[Seen], timeout_s: float) -> StallError:
    """The error for a job that stands still."""
    absent = missing(seen)
    waited = format_seconds(timeout_s)
    if not absent:
        return StallError(
            f"all ranks wait for each other, and nothing has come for {waited}",
            where=_BENEATH.join(_last(one) for one in seen),
            remedy="look whether the network between the hosts works; --sync-timeout SECONDS waits longer",
        )
    return StallError(
        f"{_names(absent)} {'keep' if len(absent) > 1 else 'keeps'} the others waiting, for {waited} now",
        where=_BENEATH.join(_last(one) for one in absent),
        remedy=_remedy(absent[0]),
        rank=absent[0].line.rank,
    )


def _was_leaving(one: Seen) -> bool:
    return one.line.state is State.LEAVING and one.idle_s >= LEAVING_S


def _progress(one: Seen) -> tuple[int, int]:
    return one.line.step, one.line.micro_step


def _names(several: Sequence[Seen]) -> str:
    numbers = [str(one.line.rank) for one in several]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"


def _place(line: Line) -> str:
    process = f" (process {line.pid})" if line.pid else ""
    return f"rank {line.rank} on {line.host_name}{process}"


def _last(one: Seen) -> str:
    if one.process is Process.SILENT:
        return f"{_place(one.line)}: {one.line}"
    is_stopped = "its process is stopped; " if one.process is Process.STOPPED else ""
    at = f", at {one.line.at}" if one.line.at else ""
    return f"{_place(one.line)}: {is_stopped}{one.line} for {format_seconds(one.idle_s)}{at}"


def _remedy(one: Seen) -> str:
    longer = "--sync-timeout SECONDS waits longer"
    if one.process is Process.STOPPED:
        return f"find who stopped it (a debugger, Ctrl-Z, a batch system); {longer}"
    if one.process is Process.SILENT:
        return f"look whether that host is there, and the network between; {longer}"
    if one.line.at:
        return f"look why that line does not go on; {longer}"
    return f"look at what that rank has to do there; {longer}"
