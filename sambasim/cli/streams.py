"""Standard streams that a command can rely on, whoever started it and whoever reads what it says.

    closed from the start       what is written goes nowhere, and what is read is empty
    the reader has gone         the command ends quietly with 141, which is 128 + SIGPIPE, as shells have it; training
                                goes on in silence, so that what it is to save is saved
    the disk is full            the command says so and ends; training says so once, and goes on
    an encoding that lacks ×    the character is written in ASCII, as x

The reader of stderr is never worth ending for: what cannot be told is not told, and the exit code says the rest.
"""

import codecs
import contextlib
import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

from sambasim.errors import MachineError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

READER_GONE = 141

_STREAMS = (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY), ("stderr", os.O_WRONLY))
_PLAIN = {"×": "x", "→": "->", "…": "...", "─": "-", "│": "|", "━": "-", "≤": "<=", "≥": ">=", "·": ".", "µ": "u"}
_HANDLER = "sambasim.plain"


def settle() -> None:
    """Make this process's standard streams so. Streams that somebody put in their place are left alone."""
    for number, (name, flags) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            _open_nowhere(number, flags)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode, encoding="utf-8"))
    codecs.register_error(_HANDLER, _plainly)
    stdout, stderr = sys.__stdout__, sys.__stderr__
    if stdout is not None and sys.stdout is stdout:
        sys.stdout = _settled(stdout, _Outlet(1))
    if stderr is not None and sys.stderr is stderr:
        sys.stderr = _settled(stderr, _Outlet(2, goes_on=True, silent=True))


def outlive_readers() -> None:
    """From now on the command goes on when nobody reads what it says any more."""
    outlet = _outlet_of(sys.stdout)
    if outlet is not None:
        outlet.goes_on = True


def flush() -> None:
    """Bring out what is left. Raises as any write to stdout may: SystemExit, or MachineError."""
    sys.stdout.flush()
    sys.stderr.flush()


class _Outlet(io.FileIO):
    """The descriptor `number`. Once it cannot be written to, it leads nowhere."""

    def __init__(self, number: int, *, goes_on: bool = False, silent: bool = False) -> None:
        super().__init__(number, "w", closefd=False)
        self.goes_on = goes_on
        self._silent = silent

    def write(self, data: "ReadableBuffer", /) -> int:
        """Raises SystemExit where the reader has gone, and MachineError where there is no room, unless it goes on."""
        try:
            return super().write(data)
        except OSError as error:
            _lead_nowhere(self.fileno(), os.O_WRONLY)
            self._tell(error)
        return memoryview(data).nbytes

    def _tell(self, error: OSError) -> None:
        gone = error.errno in (errno.EPIPE, errno.EIO)  # the latter of a terminal that was closed
        if self._silent or (gone and self.goes_on):
            return
        if gone:
            raise SystemExit(READER_GONE)
        what = f"nothing more can be written to standard output: {error.strerror}"
        if not self.goes_on:
            raise MachineError(what, remedy="make room there, or let the output go elsewhere")
        print(f"warning: {what}; the run goes on", file=sys.stderr, flush=True)


def _settled(stream: TextIO, outlet: _Outlet) -> TextIO:
    """A stream to `outlet` in place of `stream`, which buffers and encodes as that does."""
    if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != outlet.fileno():
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        outlet if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(outlet),
        encoding=stream.encoding,
        errors=_HANDLER,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _outlet_of(stream: TextIO) -> _Outlet | None:
    buffer = getattr(stream, "buffer", None)
    raw = getattr(buffer, "raw", buffer)
    return raw if isinstance(raw, _Outlet) else None


def _open_nowhere(number: int, flags: int) -> None:
    """Take the descriptor `number`, if it is free: the next file that is opened would get it, and what others print."""
    try:
        os.fstat(number)
    except OSError:
        _lead_nowhere(number, flags)


def _lead_nowhere(number: int, flags: int) -> None:
    opened = os.open(os.devnull, flags)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)


def _plainly(error: UnicodeError) -> tuple[str | bytes, int]:
    """What is written for characters that the encoding of a stream does not have."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking, after = error.object[error.start], error.start + 1
    if "\udc80" <= lacking <= "\udcff":  # a byte of a file name that is no text
        return bytes([ord(lacking) - 0xDC00]), after
    return _PLAIN.get(lacking, "?"), after
