"""Read what `sambasim run --record-digests` wrote."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from sambasim.errors import ArtifactError, OptionError
from sambasim.records.digests import REPLICA_FILES, RUN_FILE, RecordedRun, StepDigests, replica_file

_REPLICA = re.compile(r"replica-([0-9]{1,9})\.jsonl")
_WRITTEN_BY = "a folder of sambasim run --record-digests FOLDER, of this version"


@dataclass(frozen=True, slots=True)
class Recording:
    """A folder of digests. `replicas` are those whose files are there, in order."""

    folder: Path
    run: RecordedRun
    replicas: tuple[int, ...]

    def steps(self, replica: int) -> Iterator[StepDigests]:
        """The steps of one replica, a line at a time. A last line without an end, as a run that is killed may leave
        it, is left out.

        Raises OptionError if the file cannot be read, and ArtifactError if a line is none of a recording.
        """
        path = self.folder / replica_file(replica)
        try:
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.endswith("\n"):
                        yield _step(line, f"{path}:{number}")
        except (OSError, UnicodeDecodeError) as error:
            raise _unreadable(path, error) from error


def is_recording(path: Path) -> bool:
    """Whether `path` is a folder of digests, whatever is in it."""
    return (path / RUN_FILE).is_file()


def read_recording(folder: Path) -> Recording:
    """What is in `folder`. Raises OptionError if it cannot be read, and ArtifactError if it is no recording."""
    path = folder / RUN_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    try:
        run = RecordedRun.model_validate_json(text)
    except ValidationError as error:
        what = f"{path.name} is not what sambasim run --record-digests writes: {_first(error)}"
        raise ArtifactError(what, where=str(path), remedy=_WRITTEN_BY) from error
    found = [_REPLICA.fullmatch(file.name) for file in folder.glob(REPLICA_FILES)]
    replicas = tuple(sorted(int(match[1]) for match in found if match))
    if not replicas:
        raise ArtifactError(
            f"{folder} has no file of a replica",
            where=str(folder / replica_file(0)),
            remedy="record the run again, or wait for its first step; ranks of other hosts write to their own disks",
        )
    return Recording(folder, run, replicas)


def _step(line: str, where: str) -> StepDigests:
    try:
        return StepDigests.model_validate_json(line)
    except ValidationError as error:
        what = f"a line is not what sambasim run --record-digests writes: {_first(error)}"
        raise ArtifactError(what, where=where, remedy=_WRITTEN_BY) from error


def _first(error: ValidationError) -> str:
    fault = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, fault['loc'])) or 'the whole'}: {fault['msg']}"


def _unreadable(path: Path, error: OSError | UnicodeDecodeError) -> OptionError:
    reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
    return OptionError(f"{path} cannot be read: {reason}", remedy=_WRITTEN_BY)
