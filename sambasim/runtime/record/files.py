"""The files of a recording: whole lines, and nothing that an earlier run has left in the folder."""

import os
from pathlib import Path

from sambasim.errors import MachineError
from sambasim.records.digests import REPLICA_FILES, RUN_FILE, RecordedRun, StepDigests, replica_file

_REMEDY = "make room there, or another place: --record-digests FOLDER"


def begin_folder(folder: Path, run: RecordedRun) -> None:
    """Make `folder`, take away the recording that is in it, and write run.json, whole or not at all.

    Raises MachineError if it cannot be written.
    """
    temporary = folder / f".{RUN_FILE}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RUN_FILE).unlink(missing_ok=True)
        for old in folder.glob(REPLICA_FILES):
            old.unlink()
        temporary.write_text(run.model_dump_json(indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, folder / RUN_FILE)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise _error(folder, error) from error


class ReplicaFile:
    """The file of one replica; it begins anew."""

    def __init__(self, folder: Path, replica: int) -> None:
        self._path = folder / replica_file(replica)
        try:
            folder.mkdir(parents=True, exist_ok=True)  # rank 0 may be on another host
            self._path.write_bytes(b"")
        except OSError as error:
            raise _error(self._path, error) from error

    def add(self, step: StepDigests) -> None:
        """One more line. Raises MachineError if it cannot be written."""
        line = step.model_dump_json().encode() + b"\n"
        try:
            with self._path.open("ab", buffering=0) as file:
                written = file.write(line)
                while written < len(line):
                    written += file.write(line[written:])
        except OSError as error:
            raise _error(self._path, error) from error


def _error(path: Path, error: OSError) -> MachineError:
    return MachineError(f"digests cannot be written to {path}: {error.strerror}", remedy=_REMEDY)
