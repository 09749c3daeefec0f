"""Which line of the app it was."""

import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType

import sambasim

_LIBRARY = f"{Path(sambasim.__file__).parent}/"
_CHECKS = f"{Path(__file__).parent}/"
_WAYS_IN = tuple(f"{_LIBRARY}{name}" for name in ("cli/", "samba/door/", "__main__.py"))
"""What has started the app."""

_OTHERS = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def app_line() -> str | None:
    """`file:line: code` of the line of the app that is being run: the deepest that is no library's."""
    for frame in _callers():
        if not frame.f_code.co_filename.startswith((_LIBRARY, *_OTHERS)):
            return _told(frame, frame.f_lineno)
    return None


def own_line_of_app() -> str | None:
    """The same, unless it is sambasim that the app has called: then None."""
    for frame in _callers():
        file = frame.f_code.co_filename
        if file.startswith(_LIBRARY) and not file.startswith(_CHECKS):
            return None
        if not file.startswith((_CHECKS, *_OTHERS)):
            return _told(frame, frame.f_lineno)
    return None


def is_called_by_app() -> bool:
    """Whether it is the app alone that has called what is being run: also an app's own code, such as a forward, may be
    called by sambasim, and sambasim by the app."""
    files = (frame.f_code.co_filename for frame in _callers())
    return not any(file.startswith(_LIBRARY) and not file.startswith((_CHECKS, *_WAYS_IN)) for file in files)


def line_of(trace: TracebackType | None) -> str | None:
    """The same of an error that came along `trace`."""
    lines = [
        _told(frame, number)
        for frame, number in walk_tb(trace)
        if not frame.f_code.co_filename.startswith((_LIBRARY, *_OTHERS, "<"))
    ]
    return lines[-1] if lines else None


def _callers() -> Iterator[FrameType]:
    """From the deepest up."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith("<"):
            yield frame
        frame = frame.f_back


def _told(frame: FrameType, number: int) -> str:
    file = os.path.normpath(frame.f_code.co_filename)
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"
