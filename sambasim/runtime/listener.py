"""What a run tells while it goes: to the progress on the screen, and to the metrics file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TextIO

from sambasim.errors import MachineError, OptionError
from sambasim.records.metrics import EvaluationRecord, Record, StepRecord, SummaryRecord
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

    def ended(self, summary: SummaryRecord) -> None:
        """The run is over, and went well."""


class SilentListener:
    """Hears everything, and does nothing with it: to be listened through for the one thing of interest."""

    def preparing(self, what: str) -> None: ...

    def started(self, start: Start) -> None: ...

    def stepped(self, step: Step) -> None: ...

    def noted(self, what: str) -> None: ...

    def evaluated(self, record: EvaluationRecord) -> None: ...

    def ended(self, summary: SummaryRecord) -> None: ...


class MetricsFile(SilentListener):
    """Writes every record as one JSON line, and flushes it. The file is there from the first record on.

    The summary comes last, and only after a run that went well: also where the file of an earlier run is overwritten.
    Raises OptionError if the file cannot be made, and MachineError if the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def started(self, start: Start) -> None:
        if self._path.is_file():
            self._open().close()  # what an earlier run left must not look like the end of this one

    def stepped(self, step: Step) -> None:
        self._write(StepRecord(**step._asdict()))

    def evaluated(self, record: EvaluationRecord) -> None:
        self._write(record)

    def ended(self, summary: SummaryRecord) -> None:
        self._write(summary).close()

    def _open(self) -> TextIO:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            return self._path.open("w", encoding="utf-8")
        except OSError as error:
            what = f"the metrics file cannot be written to {self._path}: {error.strerror}"
            raise OptionError(what, remedy="another place: --metrics FILE") from error

    def _write(self, record: Record) -> TextIO:
        self._file = self._file or self._open()
        try:
            self._file.write(record.model_dump_json() + "\n")
            self._file.flush()
        except OSError as error:
            what = f"the metrics file {self._path} cannot be written any more: {error.strerror}"
            raise MachineError(what, remedy="make room there, or another place: --metrics FILE") from error
        return self._file


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

    def ended(self, summary: SummaryRecord) -> None:
        for member in self._members:
            member.ended(summary)
