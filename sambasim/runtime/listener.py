"""What a run tells while it goes: to the progress on the screen, and to the metrics file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TextIO

from sambasim.errors import OptionError
from sambasim.records.metrics import EvaluationRecord, Record, StepRecord, SummaryRecord
from sambasim.runtime.plan import Plan


@dataclass(frozen=True, slots=True)
class Start:
    """What is known before the first step."""

    name: str
    plan: Plan
    sync: str
    threads: int
    data: str
    notices: tuple[str, ...]
    seconds_to_start_s: float


class Listener(Protocol):
    """Hears what happens, in order. Only rank 0 has listeners that print."""

    def started(self, start: Start) -> None:
        """Training begins."""

    def stepped(self, record: StepRecord) -> None:
        """One step is done."""

    def evaluated(self, record: EvaluationRecord) -> None:
        """One evaluation is done."""

    def ended(self, summary: SummaryRecord) -> None:
        """The run is over, and went well."""


class MetricsFile:
    """Writes every record as one JSON line, and flushes it. Raises OptionError if the file cannot be written."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("w", encoding="utf-8")
        except OSError as error:
            raise OptionError(
                f"the metrics file {path} cannot be written: {error.strerror}", remedy="--metrics FILE"
            ) from error

    def started(self, start: Start) -> None:
        """Nothing: the summary repeats it."""

    def stepped(self, record: StepRecord) -> None:
        self._write(record)

    def evaluated(self, record: EvaluationRecord) -> None:
        self._write(record)

    def ended(self, summary: SummaryRecord) -> None:
        self._write(summary)
        self._file.close()

    def _write(self, record: Record) -> None:
        self._file.write(record.model_dump_json() + "\n")
        self._file.flush()


class Listeners:
    """Several listeners as one."""

    def __init__(self, members: Sequence[Listener]) -> None:
        self._members = members

    def started(self, start: Start) -> None:
        for member in self._members:
            member.started(start)

    def stepped(self, record: StepRecord) -> None:
        for member in self._members:
            member.stepped(record)

    def evaluated(self, record: EvaluationRecord) -> None:
        for member in self._members:
            member.evaluated(record)

    def ended(self, summary: SummaryRecord) -> None:
        for member in self._members:
            member.ended(summary)
