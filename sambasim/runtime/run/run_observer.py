"""The observer interface of a run, the metrics file, and text files that are written in whole lines."""

import csv
import errno
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sambasim.errors import MachineError, OptionError, failing_with
from sambasim.files import claimed, once, unless_foreign_link, write_whole
from sambasim.records.metrics import (
    CheckpointRecord,
    EvaluationRecord,
    Line,
    StepRecord,
    SummaryRecord,
    columns_of,
    json_line,
)
from sambasim.runtime.run.plan import Plan
from sambasim.runtime.watch.observer import forward_events
from sambasim.units import first_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Start:
    """What is known before the first step. `placement` describes the ranks on the simulated machine, if it was asked
    for; `chips` of a replica share its batch; `rank` is this one with its coordinates, if there is an axis other than
    dp. An observer may read `weights`, on rank 0 or everywhere, and `stop` the run after an event, on all ranks alike.
    """

    name: str
    plan: Plan
    sync: str
    threads: int
    data: str
    notices: tuple[str, ...]
    placement: str = ""
    chips: int = 1
    rank: str = ""
    seed: int = 0
    weights: "Callable[[bool], Mapping[str, Tensor]]" = lambda everywhere: {}
    stop: Callable[[str], object] = lambda why: None


class RunObserver:
    """Override the methods of interest; all of them do nothing here. They are called in this order."""

    def preparing(self, what: str) -> None:
        """Progress of something that takes long before training."""

    def started(self, start: Start) -> None:
        """Training begins."""

    def recorded(self, record: Line) -> None:
        """What the next events do here: one of them has this record."""

    def stepped(self, step: StepRecord) -> None:
        """A step has ended."""
        self.recorded(step)

    def noted(self, what: str) -> None:
        """A message for the user."""

    def evaluated(self, record: EvaluationRecord) -> None:
        """An evaluation has ended."""
        self.recorded(record)

    def saved(self, record: CheckpointRecord) -> None:
        """A checkpoint has been written."""
        self.recorded(record)

    def ended(self, summary: SummaryRecord) -> None:
        """The run has ended without an error."""
        self.recorded(summary)


class RunObservers(RunObserver):
    """Calls several observers in order."""

    def __init__(self, members: Sequence[RunObserver]) -> None:
        forward_events((name for name in vars(RunObserver) if not name.startswith("_")), self, members)


class MetricsFile(RunObserver):
    """Writes every record as one JSON line, whole or not at all; or those of the kind `of_table` as rows of a table. A
    resumed run keeps the records of the steps before it. Raises OptionError if the file cannot be created, and
    MachineError if the disk is full. `warn`: see LineFile."""

    def __init__(
        self, path: Path, warn: Callable[[str], None] = lambda what: None, of_table: str | None = None
    ) -> None:
        self._path, self._warn, self._of_table = path, warn, of_table
        self._file: LineFile | None = None
        self._head, self._lines, self._has_left = "", 0, False

    def started(self, start: Start) -> None:
        if not self._path.is_file():
            return
        # The summary of an earlier run must not count as the end of this one; an earlier part of this run stays.
        kept, step = [], start.plan.start.step
        if step:
            with self._path.open(encoding="utf-8", errors="replace") as file:
                kept = [line for line in file if line.endswith("\n") and _step_of(line) <= step]
        self._lines, self._head = len(kept), "".join(kept[:1])
        self._file = self._open("".join(kept))

    def recorded(self, record: Line) -> None:
        if self._of_table in (None, record.kind):
            self._file = self._file or self._open()
            self._file.write(json_line(record) if self._of_table is None else self._row(record))
            self._lines += 1

    def ended(self, summary: SummaryRecord) -> None:
        self.recorded(summary.model_copy(update={"lines": self._lines}))
        if self._file is not None:
            self._file.close()

    def _open(self, kept: str = "") -> "LineFile":
        return LineFile(self._path, "the metrics file", "--metrics FILE", self._warn, kept)

    def _row(self, record: Line) -> str:
        """Of the columns of the head, which the first one gives; what has none is told once."""
        figures, begun = columns_of(record), self._head
        self._head = begun or _csv_line(figures)
        names = next(csv.reader([self._head]))
        if (left := [name for name in figures if name not in names]) and not self._has_left:
            self._has_left = True
            what = f"{self._path} has no column for {first_of(left, 3)}, which is left out"
            self._warn(f"warning: {what}; a FILE.jsonl takes records of any names")
        row = _csv_line(map(figures.get, names))
        return row if begun else self._head + row


def metrics_files(path: Path, warn: Callable[[str], None]) -> list[RunObserver]:
    """FILE.csv has a row for each step, and FILE.evaluations.csv for each evaluation; another file has all records."""
    if path.suffix != ".csv":
        return [MetricsFile(path, warn)]
    beside = path.with_suffix(".evaluations.csv")
    return [MetricsFile(path, warn, "step"), MetricsFile(beside, warn, "evaluation")]


def _csv_line(cells: Iterable[object]) -> str:
    csv.writer(text := io.StringIO(), lineterminator="\n").writerow(cells)
    return text.getvalue()


def _step_of(line: str) -> float:
    """The step of a record, or of a row of a table, 0 for its head; infinity for a line that is not kept."""
    first = line.partition(",")[0]
    if first.isdecimal() or first == "step":
        return int(first) if first.isdecimal() else 0
    with suppress(ValueError):
        match json.loads(line, object_pairs_hook=once):
            case {"kind": "step" | "evaluation" | "checkpoint", "step": int(step)}:
                return step
    return math.inf


def print_whole_lines() -> None:
    """Write each printed line by one call, also with PYTHONUNBUFFERED: mpirun mixes what its ranks write."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


class LineFile:
    """A text file that grows by whole, unbuffered lines, and its folder; `what` and `flag` name it in errors. `warn` is
    called once if it is removed or replaced meanwhile. It begins with `kept`; None: what is there. Raises OptionError.
    """

    def __init__(self, path: Path, what: str, flag: str, warn: Callable[[str], None], kept: str | None = "") -> None:
        self._path, self._what, self._flag, self._warn, self._is_there = path, what, flag, warn, True
        with failing_with(OptionError, f"{what} cannot be written to {path}", f"another place: {flag}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            if kept:
                write_whole(path, kept)
            self._file = io.FileIO(path, "a", opener=unless_foreign_link)
            if kept is not None and path.is_file():  # and no pipe or device, which several may write to
                is_mine = True
                with suppress(OSError):  # a file system without locks
                    is_mine = claimed(self._file)
                if not is_mine:
                    self._file.close()
                    raise OSError(errno.EBUSY, "another run is writing it")
                self._file.truncate(len(kept.encode()))

    def write(self, lines: str) -> None:
        """Add `lines`, with their ends. Raises MachineError if that fails, and removes what was written of them."""
        size = os.fstat(self._file.fileno()).st_size
        left = memoryview(lines.encode("utf-8", errors="backslashreplace"))
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            with suppress(OSError):  # a pipe or a device has no length
                self._file.truncate(size)
            what = f"{self._what} {self._path} cannot be written any more: {error.strerror}"
            raise MachineError(what, remedy=f"free space there, or another place: {self._flag}") from error
        if self._is_there and not self._has_its_name():
            self._is_there = False
            self._warn(f"warning: {self._path} was removed or replaced while it was written, and lacks what follows")

    def _has_its_name(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def close(self) -> None:
        self._file.close()
