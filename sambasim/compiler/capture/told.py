"""What a call does outside of Python is told: a PEF has what a file gave for the example batch, and does nothing of it
itself."""

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

from sambasim.compiler.capture import explain
from sambasim.compiler.capture.recording import frames, running_line
from sambasim.compiler.capture.trial import logs_disabled, replaced
from sambasim.whose_code import is_library_file, is_users_file

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
    """What the user's code opens and does is added to `told`, and what it prints is dropped."""
    _listen()
    with (
        replaced(sys.modules[__name__], "_told", told),
        logs_disabled(logging.NOTSET),
        contextlib.redirect_stdout(_Printed()),
        contextlib.redirect_stderr(_Printed()),
        replaced(logging.Logger, "callHandlers", lambda _, record: _hear_text("a log message", record.pathname)),
        warnings.catch_warnings(),
        replaced(warnings, "showwarning", lambda message, kind, file, *more: _hear_text("a warning", file)),
    ):
        warnings.simplefilter("always")
        yield


@cache  # Python has no way to take it back
def _listen() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if event in _ACTS:
        _tell(explain.DONE, event)
    elif event == "open" and not isinstance(arguments[0], int) and not str(arguments[0]).endswith(_CODE):
        _tell(explain.OPENED, str(arguments[0]))


def _hear_text(what: str, file: str) -> None:
    if is_users_file(file):
        _tell(explain.DONE, what)


def _tell(template: str, what: str) -> None:
    told = _told
    if told is None or getattr(_adding, "is_on", False):
        return
    _adding.is_on = True
    try:
        files = takewhile(is_library_file, (frame.f_code.co_filename for frame in frames()))
        if not any(file.startswith("<frozen importlib") for file in files) and (line := running_line()) is not None:
            told.setdefault(template, {})[f"{what}, at {line}"] = None
    finally:
        _adding.is_on = False


class _Printed(io.StringIO):
    def write(self, text: str, /) -> int:
        _tell(explain.DONE, "output")
        return len(text)
