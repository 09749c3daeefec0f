"""Files and folders that a command writes: checked before the work that they would be lost with."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from sambasim.errors import MachineError, OptionError, failing_with
from sambasim.files import write_whole


def check_output_file(path: Path, what: str, remedy: str) -> None:
    """Raises OptionError if the file `path` cannot be written. Missing folders are no error. Nothing is left behind."""
    if path.is_dir():
        why: str | None = f"{path} is a folder"
    elif path.exists() and not os.access(path, os.W_OK):
        why = f"{path} is not writable"
    elif path.is_fifo() and not path.is_symlink():
        why = f"{path} is a named pipe, which waits for a reader"
    elif _is_device(path):
        why = None  # such as /dev/stdout: it is written in place
    else:
        why = _folder_problem(path.parent)
    if why:
        raise OptionError(f"{what} cannot be written to {path}", where=why, remedy=remedy)


_SUFFIXES = {"--html": ".html", "--csv": ".csv", "--all": ".csv", "--plot": ".svg", "--trace": ".json"}


def check_output_files(files: Mapping[str, tuple[str, Path | None]], *inputs: Path | None) -> None:
    """Check the files that flags name, each with what it is. None may be one of the others, or of `inputs`."""
    named = {flag: (what, path) for flag, (what, path) in files.items() if path is not None}
    for flag, (what, path) in named.items():
        remedy = f"another place: {flag} FILE{_SUFFIXES.get(flag, path.suffix)}"
        check_output_file(path, what, remedy)
        others = (other for name, (_, other) in named.items() if name != flag)
        for which, paths in (("its own input", filter(None, inputs)), ("another file of this command", others)):
            if path.resolve() in [other.resolve() for other in paths] and not _is_device(path):
                raise OptionError(f"{flag} {path} would overwrite {which}", remedy=remedy)


def check_output_folder(path: Path, what: str, remedy: str) -> None:
    """As `check_output_file`, for a folder of files."""
    if why := _folder_problem(path):
        raise OptionError(f"{what} cannot be written to {path}", where=why, remedy=remedy)


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _folder_problem(path: Path) -> str | None:
    """Why no file can be made in the folder `path`, or in the folder in which it would be created."""
    path = Path(os.path.abspath(path))
    folder = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not folder.is_dir():
        return f"{folder} is not a folder"
    try:
        # os.access says yes on a read-only disk and in /proc, so a file is made.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"no file can be made in {folder}: {error.strerror}"
    return None


def write(file: Path, text: str) -> None:
    with failing_with(MachineError, f"{file} cannot be written", "free disk space there, or name another place"):
        write_whole(file, text)
