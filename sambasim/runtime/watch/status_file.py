"""The status file of a node: a text file with a line for each of its ranks, which says where in a step a rank is.

    rank host             pid         step micro state   doing                       mesh        at (once it takes long)
       1 node7            4712          17     1 running section 3 of 9 (BCKWD_2)    dp 0, pp 1

`mesh` is empty if the only axis is dp. Every rank maps the file. It survives the death of all ranks. An update copies
a few bytes, without a system call.
"""

import fcntl
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from glob import escape
from itertools import accumulate
from pathlib import Path
from typing import Self

from sambasim.errors import MachineError
from sambasim.ir.dataflow import pass_and_update
from sambasim.ir.graph import Section
from sambasim.ir.program import Program
from sambasim.records.trace import Track
from sambasim.runtime.watch.observer import SpanArgs, StepObserver

_WIDTHS = {"rank": 6, "host": 24, "pid": 10, "step": 10, "micro": 6, "state": 7, "doing": 80, "mesh": 24, "at": 256}
_NUMBERS = ("rank", "pid", "step", "micro")
_ENDS = [total - 1 for total in accumulate(width + 1 for width in _WIDTHS.values())]  # a blank between two
_COLUMNS = {name: slice(end - _WIDTHS[name], end) for name, end in zip(_WIDTHS, _ENDS, strict=True)}
_HEADINGS = {name: name for name in _WIDTHS} | {"at": "at (once it takes long)"}
LINE_BYTES = _ENDS[-1] + 1
STARTING = "starting"  # what a rank does first


class State(StrEnum):
    """What other ranks may expect of a rank."""

    RUNNING = "running"
    WAITING = "waiting"  # for other ranks
    BUSY = "busy"  # in something that may take any time: the others wait while its process exists
    LEAVING = "leaving"  # it has failed, and ends the job
    ENDED = "ended"  # it has finished its work


_STATES = {state[0]: state for state in State}
"""By first letter, because a line may be read while it is written, and one byte is always whole."""


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One line. `step` is 0 before the first step, `micro_step` if a step has one, `pid` before the rank starts."""

    rank: int
    host_name: str
    pid: int
    step: int
    micro_step: int
    state: State
    doing: str
    at: str = ""
    mesh: str = ""

    def __str__(self) -> str:
        steps = {"step": self.step, "micro-step": self.micro_step}
        return ", ".join([*(f"{name} {number}" for name, number in steps.items() if number), self.doing])


class Activity:
    """Writes the line of one rank: what it is doing now. Each method copies a few bytes."""

    def __init__(self, memory: mmap.mmap | bytearray, start: int = 0) -> None:
        self._memory = memory
        self._start = start
        self._of = {name: slice(start + column.start, start + column.stop) for name, column in _COLUMNS.items()}
        self._state_and_doing = slice(self._of["state"].start, self._of["doing"].stop)

    def does(self, what: str) -> None:
        self.set(prepare(State.RUNNING, what))

    def takes_long(self, what: str) -> None:
        """The rank does `what`, which may take any time, such as writing a large file."""
        self.set(prepare(State.BUSY, what))

    def waits(self, what: str) -> None:
        self.set(prepare(State.WAITING, what))

    def set(self, prepared: bytes) -> None:
        self._memory[self._state_and_doing] = prepared

    def begin(self, rank: int, host_name: str, pid: int, mesh: str = "") -> None:
        """`mesh`: the coordinates of the rank."""
        cells = {"rank": str(rank), "host": host_name, "pid": str(pid), "mesh": mesh}
        cells |= {"state": State.RUNNING, "doing": STARTING}
        self._memory[self._start : self._start + LINE_BYTES] = _row(cells)

    def step(self, number: int) -> None:
        """The current step, from 1; 0 for none."""
        self._memory[self._of["step"]] = b"%10d" % number if number else b" " * 10

    def micro_step(self, number: int) -> None:
        """The current micro-step, from 1; 0 for none."""
        self._memory[self._of["micro"]] = b"%6d" % number if number else b" " * 6

    def state(self, state: State) -> None:
        self._memory[self._of["state"]] = _cell("state", state)

    def at(self, place: str) -> None:
        """The current line of Python. A long one loses its beginning."""
        width = _WIDTHS["at"]
        self._memory[self._of["at"]] = _cell("at", place if len(place) <= width else f"...{place[3 - width :]}")


UNWATCHED = Activity(bytearray(LINE_BYTES))


class StatusFile:
    """The mapped status file of one node. Line i belongs to local rank i."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("r+b")  # stays open: its lock shows other runs that this process lives
        with suppress(OSError):  # a file system without locks
            fcntl.flock(self._file, fcntl.LOCK_SH)
        self._memory = mmap.mmap(self._file.fileno(), 0)

    @classmethod
    def create(cls, folders: Sequence[Path], name: str, local_size: int) -> Self:
        """A new file in the first of `folders` that can be written; those of killed runs go. Raises MachineError."""
        reasons = []
        for folder in folders:
            path, hidden = folder / name, folder / f".{name}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                hidden.unlink(missing_ok=True)  # of an earlier process with the same number
                with hidden.open("xb") as file:
                    # On a full disk, the first write to a sparse mapping would kill the rank by SIGBUS.
                    os.posix_fallocate(file.fileno(), 0, LINE_BYTES * (local_size + 1))
                    file.write(_row(_HEADINGS) + _row({}) * local_size)
                created = cls(hidden)
                created.path = hidden.rename(path)  # once it is locked: other runs remove what nobody has locked
                _remove_earlier(folder, name)
                return created
            except (OSError, ValueError) as error:
                with suppress(OSError):
                    hidden.unlink()
                reasons.append(f"{folder}: {getattr(error, 'strerror', None) or error}")
        what = f"the status file of the ranks cannot be written: {'; '.join(reasons)}"
        raise MachineError(what, remedy="free space there, or name a folder that can be written: --log-dir FOLDER")

    @classmethod
    def attach(cls, path: Path) -> Self:
        """The file that another rank of this node has created. Raises MachineError if this rank cannot write to it."""
        try:
            return cls(path)
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            what = f"another rank of this host created {path}, and this rank cannot write to it: {why}"
            remedy = "name a folder that every rank of a host can write: --log-dir FOLDER"
            raise MachineError(what, remedy=remedy) from error

    def ranks(self) -> Sequence[RankStatus]:
        return [self._status(start) for start in range(LINE_BYTES, len(self._memory), LINE_BYTES)]

    def activity(self, local_rank: int) -> Activity:
        return Activity(self._memory, LINE_BYTES * (local_rank + 1))

    def _status(self, start: int) -> RankStatus:
        raw = self._memory[start : start + LINE_BYTES]
        text = {name: raw[column].decode("ascii", "replace").strip() for name, column in _COLUMNS.items()}
        # Another process may be writing a number at this moment.
        rank, pid, step, micro = (int("".join(filter(str.isdecimal, text[name])) or 0) for name in _NUMBERS)
        state = _STATES.get(text["state"][:1], State.RUNNING)
        return RankStatus(rank, text["host"], pid, step, micro, state, text["doing"], text["at"], text["mesh"])


def prepare(state: State, doing: str) -> bytes:
    return _cell("state", state) + b" " + _cell("doing", doing)


def name_of(title: str, host_name: str, pid: int) -> str:
    """The name of a status file; `pid` is that of the rank that creates it."""
    return "-".join(part for part in (title, "ranks", re.sub(r"[^\w.]", "_", host_name), str(pid)) if part) + ".txt"


def _remove_earlier(folder: Path, name: str) -> None:
    """Remove the files of earlier runs of this PEF on this host that no process has open."""
    for path in folder.glob(f"{escape(name.rpartition('-')[0])}-*.txt"):
        if path.name != name and path.stem.rpartition("-")[2].isdecimal():
            with suppress(OSError), path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while a process has it open
                path.unlink()


def _row(cells: Mapping[str, str]) -> bytes:
    return b" ".join(_cell(name, cells.get(name, "")) for name in _WIDTHS) + b"\n"


def _cell(name: str, text: str) -> bytes:
    """`text` in the width of its column: padded, or cut off."""
    width = _WIDTHS[name]
    raw = "".join(c if c.isprintable() else "?" for c in text[:width]).encode("ascii", "replace")
    return raw.rjust(width) if name in _NUMBERS else raw.ljust(width)


_WAITING = prepare(State.WAITING, "waiting for peers")
_READING = prepare(State.RUNNING, "reading data")
_REPORTING = prepare(State.RUNNING, "reporting the step")


class StepStatus(StepObserver):
    """Writes to `activity` what happens in the steps of `program`. Each event copies a few prepared bytes."""

    detailed = False

    def __init__(self, activity: Activity, program: Program) -> None:
        self._activity, self._set = activity, activity.set
        graph = program.leading
        sections, _ = pass_and_update(graph)
        whole = len(graph.sections)
        texts = (f"section {number} of {whole} ({section.name})" for number, section in enumerate(sections, 1))
        self._texts = [prepare(State.RUNNING, text) for text in texts]
        self._syncing = cache(lambda name: prepare(State.WAITING, f"sync with peers: {name}"))
        self._names_micro_step = False
        self._now = _WAITING  # what this rank does while it does not communicate

    def step_begins(self, step: int) -> None:
        self._activity.step(step + 1)
        self._now = _WAITING
        self._set(_WAITING)

    def batch_begins(self, replica: int, micro_step: int) -> None:
        self._now = _READING
        self._set(_READING)

    def pass_begins(self, replica: int, micro_step: int) -> None:
        if micro_step:  # most steps have only one, so the first is not numbered
            self._activity.micro_step(micro_step + 1)
            self._names_micro_step = True
        self._now = self._texts[0]
        self._set(self._now)

    def sections_end(self, replica: int, sections: Sequence[Section], began_ns: int) -> None:
        ended = sections[-1].index + 1
        if ended < len(self._texts):
            self._now = self._texts[ended]
            self._set(self._now)

    def pass_ends(self, replica: int, loss: float) -> None:
        self._now = _WAITING
        self._set(_WAITING)

    def span_begins(self, replica: int, track: Track, name: str) -> None:
        if track is Track.COLLECTIVES:
            self._set(self._syncing(name))

    def span_ends(self, replica: int, track: Track, name: str, began_ns: int, args: SpanArgs) -> None:
        if track is Track.COLLECTIVES:
            self._set(self._now)

    def step_ends(self, step: int, norm: float | None) -> None:
        if self._names_micro_step:
            self._activity.micro_step(0)
            self._names_micro_step = False
        self._set(_REPORTING)
