"""Which line of the user's an exception came from."""

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

import sambasim

_NOT_THE_USERS = (
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(sambasim.__file__).parent),
)


def _chain(error: BaseException) -> Iterator[traceback.FrameSummary]:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith("<"):
            yield frame


def user_line(error: BaseException) -> str | None:
    """`file:line: code` of the deepest frame that is neither Python's, nor a library's, nor ours.

    Where all frames are a library's, the deepest of them. None if there is no frame at all.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = list(_chain(error))
    users = (f for f in frames if not any(Path(f.filename).is_relative_to(folder) for folder in _NOT_THE_USERS))
    frame = next(users, frames[0] if frames else None)
    return None if frame is None else f"{frame.filename}:{frame.lineno}: {frame.line}"


def summary(error: BaseException) -> str:
    """The exception's class and the first line of what it says: `ValueError: bad label`."""
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    first = said.strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__
