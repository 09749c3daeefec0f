"""What a run tells while it goes: to the progress on the screen, and to the metrics file."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from sambasim.errors import MachineError, OptionError
from sambasim.records.metrics import CheckpointRecord, EvaluationRecord, Record, StepRecord, SummaryRecord
from sambasim.runtime.output import LineFile, write_whole
from sambasim.runtime.plan import Plan


class Step(NamedTuple):
    """One optimizer step, as StepRecord tells of it. Steps may take less time than checking a record does, and most
    listeners keep none."""

    step: int
    epoch: int
    loss: float
    lr: float
    step_s: float
    sync_s: float
    hidden_sync_s: float
    samples_per_s: float
    grad_norm: float | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """What is known before the first step. `placement` says where replicas sit on the simulated machine."""

    name: str
    plan: Plan
    sync: str
    threads: int
    data: str
    notices: tuple[str, ...]
    seconds_to_start_s: float
    placement: str = ""


class Listener(Protocol):
    """Hears what happens, in order. Only rank 0 has listeners that print."""

    def preparing(self, what: str) -> None:
        """Something that takes long before training, and how far it is."""

    def started(self, start: Start) -> None:
        """Training begins."""

    def stepped(self, step: Step) -> None:
        """One step is done."""

    def noted(self, what: str) -> None:
        """Something to know that is no step and no evaluation."""

    def evaluated(self, record: EvaluationRecord) -> None:
        """One evaluation is done."""

    def saved(self, record: CheckpointRecord) -> None:
        """A checkpoint has been written."""

    def ended(self, summary: SummaryRecord) -> None:
        """The run is over, and went well."""


class SilentListener:
    """Hears everything, and does nothing with it: to be listened through for the one thing of interest."""

    def preparing(self, what: str) -> None: ...

    def started(self, start: Start) -> None: ...

    def stepped(self, step: Step) -> None: ...

    def noted(self, what: str) -> None: ...

    def evaluated(self, record: EvaluationRecord) -> None: ...

    def saved(self, record: CheckpointRecord) -> None: ...

    def ended(self, summary: SummaryRecord) -> None: ...


class MetricsFile(SilentListener):
    """Writes every record as one JSON line, whole or not at all. The file is there from the first record on.

    The summary comes last, and only after a run that came to its end: also where the file of an earlier run is
    overwritten. A run that is resumed keeps what an earlier part of it has written of the steps that it does not take
    again. Raises OptionError if the file cannot be made, and MachineError if the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: LineFile | None = None

    def started(self, start: Start) -> None:
        if not self._path.is_file():
            return
        # What an earlier run left must not look like the end of this one; what this run has left must not get lost.
        kept = self._lines_until(start.plan.start.step)
        if kept:
            try:
                write_whole(self._path, "".join(kept))
            except OSError as error:
                raise self._unwritable(error) from error
        self._file = self._open(keeps=bool(kept))

    def stepped(self, step: Step) -> None:
        self._write(StepRecord(**step._asdict()))

    def evaluated(self, record: EvaluationRecord) -> None:
        self._write(record)

    def saved(self, record: CheckpointRecord) -> None:
        self._write(record)

    def ended(self, summary: SummaryRecord) -> None:
        self._write(summary).close()

    def _open(self, *, keeps: bool = False) -> LineFile:
        try:
            return LineFile(self._path, keeps=keeps)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> OptionError:
        what = f"the metrics file cannot be written to {self._path}: {error.strerror}"
        return OptionError(what, remedy="another place: --metrics FILE")

    def _lines_until(self, step: int) -> list[str]:
        """The lines that an earlier part of this run has written of its first steps."""
        if not step:
            return []
        with self._path.open(encoding="utf-8", errors="replace") as file:
            return [line for line in file if line.endswith("\n") and _step_of(line) <= step]

    def _write(self, record: Record) -> LineFile:
        self._file = self._file or self._open()
        return self._put(record.model_dump_json() + "\n")

    def _put(self, text: str) -> LineFile:
        file = self._file or self._open()
        try:
            file.write(text)
        except OSError as error:
            what = f"the metrics file {self._path} cannot be written any more: {error.strerror}"
            raise MachineError(what, remedy="make room there, or another place: --metrics FILE") from error
        return file


def _step_of(line: str) -> float:
    """The step that a line is of; more than any for the summary, and for what is no record."""
    try:
        record = json.loads(line)
    except ValueError:
        return math.inf
    is_kept = isinstance(record, dict) and record.get("kind") in ("step", "evaluation", "checkpoint")
    step = record.get("step") if is_kept else None
    return step if isinstance(step, int) else math.inf


class Listeners:
    """Several listeners as one."""

    def __init__(self, members: Sequence[Listener]) -> None:
        self._members = members

    def preparing(self, what: str) -> None:
        for member in self._members:
            member.preparing(what)

    def started(self, start: Start) -> None:
        for member in self._members:
            member.started(start)

    def stepped(self, step: Step) -> None:
        for member in self._members:
            member.stepped(step)

    def noted(self, what: str) -> None:
        for member in self._members:
            member.noted(what)

    def evaluated(self, record: EvaluationRecord) -> None:
        for member in self._members:
            member.evaluated(record)

    def saved(self, record: CheckpointRecord) -> None:
        for member in self._members:
            member.saved(record)

    def ended(self, summary: SummaryRecord) -> None:
        for member in self._members:
            member.ended(summary)
