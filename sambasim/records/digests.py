"""The files of `sambasim run --record-digests FOLDER`, which `sambasim compare` reads.

run.json holds what decides the bits of the run; replica-R.jsonl the initial state of replica R, then a line for each
recorded step, written whole. A norm that is infinite or NaN is null, and `not_finite` counts the elements that cause
it.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from sambasim.errors import LARGEST_RECORDS_BYTES, ArtifactError, IncompleteError, OptionError, failing_with
from sambasim.files import read_text, regular
from sambasim.records import Count, Record, RunFacts, parsed

RUN_FILE = "run.json"
REPLICA_FILES = "replica-*.jsonl"


def replica_file(replica: int) -> str:
    return f"replica-{replica}.jsonl"


What = Literal["parameter", "buffer", "state", "input", "value", "loss", "gradient"]
"""The role of a tensor in a step. "parameter" and "state" are taken after the update, "input" is of a micro-step,
"value" leaves its section, "gradient" is accumulated so far, "buffer" is as its section wrote it."""


class ValueDigest(NamedTuple):
    """The digest of one tensor at one point of a step. In JSON, a list in this order. `digest` is of dtype, shape and
    bytes (BLAKE2b, 8 bytes), `norm` L2 in float64. Micro-step and section count from 0; None after the update."""

    what: What
    name: str
    micro_step: Count | None
    section: Count | None
    digest: str
    norm: float | None
    not_finite: Count = 0


class StepDigests(Record):
    """A recorded step, counted from 1. With `begins`, the initial state, as the step before the first recorded one.
    `loss` is the mean over replicas; None if it is not finite, and for the initial state."""

    step: Count
    begins: bool = False
    loss: float | None = None
    values: tuple[ValueDigest, ...]


class RecordedRun(RunFacts):
    """The content of run.json: everything that decides the bits of a run, and what was recorded. `ranks` each have a
    file; `options` go by dotted name, `sections` are called so; `sees`: an engine that compiles sections together hides
    the values inside."""

    kind: Literal["digests"] = "digests"
    by: str
    pef: str
    cpu: str
    ranks: Count
    sync: str
    options: dict[str, bool | int | float | str]
    steps: Count
    first_step: Count
    last_step: Count
    sections: tuple[str, ...]
    sees: Literal["values that leave their section", "values that leave their unit of compiled sections"]


_FLAG = "--record-digests"
_WRITTEN_BY = "a folder of sambasim run --record-digests FOLDER, of this version"


class Recording(NamedTuple):
    """A folder of digests. `replicas` are those that have a file, in order. A resumed run may begin with a later step
    than it was to record first."""

    folder: Path
    run: RecordedRun
    replicas: tuple[int, ...]

    def steps(self, replica: int) -> Iterator[StepDigests]:
        """The steps of one replica, without an incomplete last line. Raises OptionError and ArtifactError, also if
        there is no step, or a line does not follow the one before it."""
        path, last = self.folder / replica_file(replica), None
        with (
            failing_with(OptionError, f"{path} cannot be read", _WRITTEN_BY),
            open(path, encoding="utf-8", opener=regular) as lines,
        ):
            for number, line in enumerate(lines, 1):
                if line.endswith("\n"):
                    step = parsed(line, StepDigests.model_validate_json, _FLAG, f"{path}:{number}")
                    due = max(step.step, self.run.first_step - 1) if last is None else last + 1
                    if (step.step, step.begins) != (due, last is None):
                        named = "the initial state" if last is None else f"one of step {due}"
                        what = f"{path.name}: a line is of step {step.step}, where {named} is due"
                        raise IncompleteError(what, where=f"{path}:{number}", remedy=_WRITTEN_BY)
                    last = step.step
                    yield step
        if last is None:
            remedy = "record the run again, or wait for its first step"
            raise ArtifactError(f"replica {replica} has no recorded step", where=str(path), remedy=remedy)


def is_recording(path: Path) -> bool:
    return (path / RUN_FILE).is_file()


def read_recording(folder: Path) -> Recording:
    """Open the recording in `folder`. Raises OptionError if it cannot be read, and ArtifactError if it is invalid."""
    path = folder / RUN_FILE
    with failing_with(OptionError, f"{path} cannot be read", _WRITTEN_BY):
        text = read_text(path, LARGEST_RECORDS_BYTES)
    run = parsed(text, RecordedRun.model_validate_json, _FLAG, str(path), path.name)
    names = (re.fullmatch(r"replica-([0-9]{1,9})\.jsonl", file.name) for file in folder.glob(REPLICA_FILES))
    replicas = tuple(sorted(int(name[1]) for name in names if name))
    if not replicas:
        remedy = "record the run again, or wait for its first step; ranks of other hosts write to their own disks"
        where = str(folder / replica_file(0))
        raise ArtifactError(f"{folder} has no file of a replica", where=where, remedy=remedy)
    return Recording(folder, run, replicas)
