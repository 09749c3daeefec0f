"""The board of a node: a small text file with a line for each of its ranks, that says what the rank is doing.

    rank host             pid         step micro state   doing                              at
       0 node7            4711          17     1 waiting waiting for peers
       1 node7            4712          17     1 running section 3 of 9 (BCKWD_2)

Every rank of the node maps the file and writes its own line, and reads those of the others. `cat` shows it; and it is
still there when all of them were killed at once. The columns have fixed widths, so that a rank can change one of them
by a copy of some bytes, in the middle of a step that takes microseconds: no call of the system, no message.
"""

import mmap
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final

from sambasim.errors import MachineError

_HOST = 24
_PID = 10
_STEP = 10
_MICRO_STEP = 6
_STATE = 7
_DOING = 80
_AT = 256
_CUT = "..."


class State(StrEnum):
    """What others may expect of a rank."""

    RUNNING = "running"
    WAITING = "waiting"
    """For others: it goes on when they do."""
    BUSY = "busy"
    """In something that may take any time: the others wait for as long as its process is there."""
    LEAVING = "leaving"
    """It has failed, and ends the job."""
    ENDED = "ended"
    """It has done all that there was to do."""


@dataclass(frozen=True, slots=True)
class Line:
    """What one rank says of itself. `step` is 0 before the first, and `micro_step` where a step has but one; `at` is
    the line of Python that it has been in for long."""

    rank: int
    host_name: str
    pid: int
    step: int
    micro_step: int
    state: State
    doing: str
    at: str = ""

    def __str__(self) -> str:
        where = [f"step {self.step}"] if self.step else []
        where += [f"micro-step {self.micro_step}"] if self.micro_step else []
        return ", ".join([*where, self.doing])


class _Columns:
    """Where the columns of a line are, in bytes from its beginning, with a blank between two."""

    rank: Final = slice(0, 6)
    host_name: Final = slice(7, 7 + _HOST)
    pid: Final = slice(host_name.stop + 1, host_name.stop + 1 + _PID)
    step: Final = slice(pid.stop + 1, pid.stop + 1 + _STEP)
    micro_step: Final = slice(step.stop + 1, step.stop + 1 + _MICRO_STEP)
    state: Final = slice(micro_step.stop + 1, micro_step.stop + 1 + _STATE)
    doing: Final = slice(state.stop + 1, state.stop + 1 + _DOING)
    at: Final = slice(doing.stop + 1, doing.stop + 1 + _AT)


LINE_BYTES = _Columns.at.stop + 1
_TITLES = ("rank", "host_name", "pid", "step", "micro_step", "state", "doing", "at")
_HEADINGS = {"host_name": "host", "micro_step": "micro", "at": "at (once it takes long)"}
_STATES = {state[0]: state for state in State}
"""By the first letter: a line may be read while its rank writes it, and one letter is written at once."""
_RIGHT = ("rank", "pid", "step", "micro_step")


class Board:
    """The board of one node, mapped. The line with index i belongs to local rank i.

    Made by `create` on one rank of the node, and by `attach` on the others.
    """

    def __init__(self, path: Path, local_size: int) -> None:
        self.path = path
        self._local_size = local_size
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), LINE_BYTES * (local_size + 1))

    def lines(self) -> Sequence[Line]:
        """What each local rank says of itself. The process of one that has not begun is 0."""
        return [self._line(index) for index in range(1, self._local_size + 1)]

    def writer(self, local_rank: int) -> "Writer":
        """What writes the line of this local rank."""
        return Writer(self._map, LINE_BYTES * (local_rank + 1))

    def _line(self, index: int) -> Line:
        raw = self._map[index * LINE_BYTES : (index + 1) * LINE_BYTES]
        text = {title: raw[getattr(_Columns, title)].decode("ascii", "replace").strip() for title in _TITLES}
        return Line(
            rank=_number(text["rank"]),
            host_name=text["host_name"],
            pid=_number(text["pid"]),
            step=_number(text["step"]),
            micro_step=_number(text["micro_step"]),
            state=_STATES.get(text["state"][:1], State.RUNNING),
            doing=text["doing"],
            at=text["at"],
        )


class Writer:
    """Writes one line of a board. Each method costs one or two copies of some bytes."""

    def __init__(self, memory: mmap.mmap, start: int) -> None:
        self._map = memory
        self._doing = _moved(slice(_Columns.state.start, _Columns.doing.stop), start)
        self._step = _moved(_Columns.step, start)
        self._micro_step = _moved(_Columns.micro_step, start)
        self._at = _moved(_Columns.at, start)
        self._whole = slice(start, start + LINE_BYTES)

    def begin(self, rank: int, host_name: str, pid: int) -> None:
        """This rank's line is there from now on."""
        said = {"rank": str(rank), "host_name": host_name, "pid": str(pid), "state": State.RUNNING, "doing": "starting"}
        self._map[self._whole] = _row(said)

    def does(self, prepared: bytes) -> None:
        """The rank is doing this from now on; `prepare` made it."""
        self._map[self._doing] = prepared

    def step(self, number: int) -> None:
        """The rank is in this step, counted from 1; 0 is in none."""
        self._map[self._step] = b"%10d" % number if number else b" " * _STEP

    def micro_step(self, number: int) -> None:
        """The rank is in this micro-step, counted from 1; 0 is in none."""
        self._map[self._micro_step] = b"%6d" % number if number else b" " * _MICRO_STEP

    def at(self, place: str) -> None:
        """The line of Python that the rank is in. Of one that is too long, the end says more than the beginning."""
        kept = place if len(place) <= _AT else _CUT + place[len(_CUT) - _AT :]
        self._map[self._at] = _cell(kept, _AT)


def prepare(state: State, doing: str) -> bytes:
    """What `Writer.does` takes: made once, and written often."""
    return _cell(state, _STATE) + b" " + _cell(doing, _DOING)


def create(folders: Sequence[Path], name: str, local_size: int) -> Board:
    """A new board for `local_size` ranks, in the first of `folders` that takes it.

    Raises MachineError if none of them does.
    """
    reasons = []
    for folder in folders:
        path = folder / name
        try:
            _write(path, local_size)
            return Board(path, local_size)
        except (OSError, ValueError) as error:
            with suppress(OSError):
                path.unlink()
            reasons.append(f"{folder}: {getattr(error, 'strerror', None) or error}")
    raise MachineError(
        f"there is no place for the file that says what each rank is doing: {'; '.join(reasons)}",
        remedy="make room there, or name a folder that can be written: --log-dir FOLDER",
    )


def attach(path: Path, local_size: int) -> Board:
    """The board that another rank of this node has made.

    Raises MachineError if this rank cannot write to it.
    """
    try:
        return Board(path, local_size)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise MachineError(
            f"another rank of this host has made {path}, and this one cannot write to it: {reason}",
            remedy="name a folder that every rank of a host can write: --log-dir FOLDER",
        ) from error


def read(path: Path) -> Sequence[Line]:
    """The lines of the board at `path`."""
    return Board(path, path.stat().st_size // LINE_BYTES - 1).lines()


def name_of(title: str, host_name: str, pid: int) -> str:
    """What a board's file is called. The process is one of the ranks whose lines it has."""
    return "-".join(part for part in (title, "ranks", re.sub(r"[^\w.]", "_", host_name), str(pid)) if part) + ".txt"


def _write(path: Path, local_size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # of a process that had this one's number before
    headings = {title: _HEADINGS.get(title, title) for title in _TITLES}
    with path.open("xb") as file:
        # Room that is only promised would be asked for at the first write, and a full disk then kills by a signal.
        os.posix_fallocate(file.fileno(), 0, LINE_BYTES * (local_size + 1))
        file.write(_row(headings) + _row({}) * local_size)


def _row(cells: dict[str, str]) -> bytes:
    parts = []
    for title in _TITLES:
        column: slice = getattr(_Columns, title)
        parts.append(_cell(cells.get(title, ""), column.stop - column.start, right=title in _RIGHT))
    return b" ".join(parts) + b"\n"


def _cell(text: str, width: int, *, right: bool = False) -> bytes:
    """`text` in `width` bytes: blanks fill it, and what is too long is cut off."""
    raw = "".join(c if c.isprintable() else "?" for c in text[:width]).encode("ascii", "replace")
    return raw.rjust(width) if right else raw.ljust(width)


def _number(text: str) -> int:
    """A number that may just be written anew, one digit after the other."""
    return int("".join(letter for letter in text if letter.isdecimal()) or 0)


def _moved(column: slice, start: int) -> slice:
    return slice(start + column.start, start + column.stop)
