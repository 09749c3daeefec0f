"""Can what was asked for be written where it was asked for? Answered before the work that it would be lost with."""

import os
import tempfile
from pathlib import Path

from sambasim.errors import OptionError


def check_output_file(path: Path, what: str, remedy: str) -> None:
    """Raises OptionError if a file `path` can certainly not be written, or replaced. Nothing is left behind.

    `what` is the file in a sentence ("the metrics file"), `remedy` what to type instead. Missing folders are as good as
    there: whoever writes makes them.
    """
    if path.is_dir():
        raise _refusal(path, what, f"{path} is a folder", remedy)
    if path.exists() and not os.access(path, os.W_OK):
        raise _refusal(path, what, f"{path} may not be written", remedy)
    if path.exists() and not path.is_file():
        return  # a device or a pipe, such as /dev/stdout: nothing is made beside it
    _check_folder(path.parent, path, what, remedy)


def check_output_folder(path: Path, what: str, remedy: str) -> None:
    """As `check_output_file`, for a folder that gets files."""
    _check_folder(path, path, what, remedy)


def _check_folder(folder: Path, path: Path, what: str, remedy: str) -> None:
    absolute = Path(os.path.abspath(folder))
    folder = next(place for place in (absolute, *absolute.parents) if os.path.lexists(place))
    if not folder.is_dir():
        raise _refusal(path, what, f"{folder} is no folder", remedy)
    try:
        # Tried and not asked for: a read-only disk and a special file system answer access() with yes.
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise _refusal(path, what, f"no file can be made in {folder}: {error.strerror}", remedy) from None


def _refusal(path: Path, what: str, why: str, remedy: str) -> OptionError:
    return OptionError(f"{what} cannot be written to {path}", where=why, remedy=remedy)
