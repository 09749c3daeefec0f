"""The line of the app that is running, for errors and findings."""

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
_STARTERS = tuple(f"{_LIBRARY}{name}" for name in ("cli/", "samba/shim/", "__main__.py"))
_OTHERS = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def app_line() -> str | None:
    """`file:line: code` of the innermost frame that belongs to no library; None if there is none."""
    for frame in _frames():
        if not frame.f_code.co_filename.startswith((_LIBRARY, *_OTHERS)):
            return _shown(frame, frame.f_lineno)
    return None


def own_line_of_app() -> str | None:
    """The same, or None if the call goes through sambasim."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if file.startswith(_LIBRARY) and not file.startswith(_CHECKS):
            return None
        if not file.startswith((_CHECKS, *_OTHERS)):
            return _shown(frame, frame.f_lineno)
    return None


def is_called_by_app() -> bool:
    """Whether no frame of sambasim is on the stack, apart from the checks and what started the app."""
    files = (frame.f_code.co_filename for frame in _frames())
    return not any(file.startswith(_LIBRARY) and not file.startswith((_CHECKS, *_STARTERS)) for file in files)


def line_of(trace: TracebackType | None) -> str | None:
    """`file:line: code` of the innermost frame of a traceback that belongs to no library."""
    lines = [
        _shown(frame, number)
        for frame, number in walk_tb(trace)
        if not frame.f_code.co_filename.startswith((_LIBRARY, *_OTHERS, "<"))
    ]
    return lines[-1] if lines else None


def _frames() -> Iterator[FrameType]:
    """From the innermost outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith("<"):
            yield frame
        frame = frame.f_back


def _shown(frame: FrameType, number: int) -> str:
    file = os.path.normpath(frame.f_code.co_filename)
    return f"{file}:{number}: {linecache.getline(file, number).strip()}"
