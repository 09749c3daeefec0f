"""Read what `sambasim run --metrics` wrote."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from sambasim.bounded import LARGEST_RECORDS_BYTES, read_text
from sambasim.errors import ArtifactError, OptionError
from sambasim.records.metrics import CheckpointRecord, EvaluationRecord, Record, StepRecord, SummaryRecord

_KINDS: Mapping[str, type[Record]] = {
    "step": StepRecord,
    "evaluation": EvaluationRecord,
    "checkpoint": CheckpointRecord,
    "summary": SummaryRecord,
}


@dataclass(frozen=True, slots=True)
class RunRecords:
    """The records of a run that tell how it trained, in order. One that failed or still goes on has no summary."""

    steps: tuple[StepRecord, ...]
    evaluations: tuple[EvaluationRecord, ...]
    summary: SummaryRecord | None


def read_run(path: Path) -> RunRecords:
    """The records in `path`. A last line without an end, as a run that is stopped leaves it, is left out.

    Raises OptionError if it cannot be read, and ArtifactError if it is no metrics file, naming the line.
    """
    try:
        text = read_text(path, LARGEST_RECORDS_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise OptionError(f"{path} cannot be read: {reason}", remedy="a file of sambasim run --metrics FILE") from error
    *lines, _ = text.split("\n")
    records = [_record(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
    if not records:
        raise ArtifactError(
            f"{path} has no records", remedy="write one with sambasim run --metrics FILE, or wait for the first step"
        )
    summaries = [record for record in records if isinstance(record, SummaryRecord)]
    return RunRecords(
        tuple(record for record in records if isinstance(record, StepRecord)),
        tuple(record for record in records if isinstance(record, EvaluationRecord)),
        summaries[-1] if summaries else None,
    )


def _record(line: str, where: str) -> Record:
    try:
        fields = json.loads(line)
        model = _KINDS[fields["kind"]]
        # JSON has no NaN and no infinity: the writer puts null.
        required = {name for name, field in model.model_fields.items() if field.annotation is float}
        return model.model_validate({k: math.nan if v is None and k in required else v for k, v in fields.items()})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = f"{error.error_count()} fields are wrong" if isinstance(error, ValidationError) else "it is no record"
        raise ArtifactError(
            f"a line is not what sambasim run --metrics writes: {what}",
            where=where,
            remedy="a file of sambasim run --metrics FILE, of this version",
        ) from error
