"""Which line of the app it was."""

import linecache
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import sambasim

_LIBRARY = f"{Path(sambasim.__file__).parent}/"
_CHECKS = f"{Path(__file__).parent}/"
_OTHERS = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def app_line() -> str | None:
    """`file:line: code` of the line of the app that is being run: the deepest that is no library's."""
    for frame in _callers():
        if not frame.f_code.co_filename.startswith((_LIBRARY, *_OTHERS)):
            return _told(frame)
    return None


def own_line_of_app() -> str | None:
    """The same, unless it is sambasim that the app has called: then None."""
    for frame in _callers():
        file = frame.f_code.co_filename
        if file.startswith(_LIBRARY) and not file.startswith(_CHECKS):
            return None
        if not file.startswith((_CHECKS, *_OTHERS)):
            return _told(frame)
    return None


def _callers() -> Iterator[FrameType]:
    """From the deepest up."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith("<"):
            yield frame
        frame = frame.f_back


def _told(frame: FrameType) -> str:
    file = frame.f_code.co_filename
    return f"{file}:{frame.f_lineno}: {linecache.getline(file, frame.f_lineno).strip()}"
