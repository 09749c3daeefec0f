"""What a call does outside of Python: a PEF has what a file gave for the example batch, and does nothing of it."""

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from typing import TypeAlias

from sambasim.compiler import rewrites
from sambasim.compiler.names import is_library_file
from sambasim.compiler.recording import frames, running_line
from sambasim.compiler.trial import replaced

Told: TypeAlias = dict[str, dict[str, None]]
"""By what is told of it: what the user's code opens and does, with its lines."""

_CODE = (".py", ".pyc", ".so")
_ACTS = {
    *("os.mkdir", "os.rmdir", "os.remove", "os.rename", "os.link", "os.symlink", "os.truncate", "os.kill"),
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"),
    *("socket.bind", "socket.connect", "socket.sendto", "socket.sendmsg"),
}
"""Audit events of Python. Who writes to a file has opened it."""

_told: Told | None = None
_adding = threading.local()  # what finds a line opens its file


@contextlib.contextmanager
def watched(told: Told) -> Iterator[None]:
    """While this is open, what the user's code opens and does is added to `told`, and what it prints is dropped."""
    global _told
    _listen()
    before, _told = _told, told
    logs = logging.root.manager.disable
    logging.disable(logging.NOTSET)
    try:
        with (
            contextlib.redirect_stdout(_Printed()),
            contextlib.redirect_stderr(_Printed()),
            replaced(logging.Logger, "callHandlers", lambda _, one: _hear_text("a log message", one.pathname)),
            warnings.catch_warnings(),
            replaced(warnings, "showwarning", lambda message, kind, file, *more: _hear_text("a warning", file)),
        ):
            warnings.simplefilter("always")
            yield
    finally:
        _told = before
        logging.disable(logs)


@cache  # Python has no way to take it back
def _listen() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if event in _ACTS:
        _tell(rewrites.DONE, event)
    elif event == "open" and not isinstance(arguments[0], int) and not str(arguments[0]).endswith(_CODE):
        _tell(rewrites.OPENED, str(arguments[0]))


def _hear_text(what: str, file: str) -> None:
    if not is_library_file(file) and "-packages" not in file:
        _tell(rewrites.DONE, what)


def _tell(template: str, what: str) -> None:
    told = _told
    if told is None or getattr(_adding, "is_on", False):
        return
    _adding.is_on = True
    try:
        files = takewhile(is_library_file, (frame.f_code.co_filename for frame in frames()))
        line = None if any(file.startswith("<frozen importlib") for file in files) else running_line()
        if line is not None:
            told.setdefault(template, {})[f"{what}, at {line}"] = None
    finally:
        _adding.is_on = False


class _Printed(io.StringIO):
    def write(self, text: str, /) -> int:
        _tell(rewrites.DONE, "output")
        return len(text)
