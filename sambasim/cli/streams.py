"""Standard streams that do not fail, whoever started the command and whoever reads its output.

    closed from the start       output is discarded, input is empty
    the reader has exited       the command exits quietly with 141, which is 128 + SIGPIPE; training goes on without
                                output, so that its results are saved
    the disk is full            the command reports it and exits; training warns once, and goes on
    an encoding that lacks ×    the character is written in ASCII, as x

A failure of stderr never ends a command: the exit code still says what happened.
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
_ASCII = {"×": "x", "→": "->", "…": "...", "─": "-", "│": "|", "━": "-", "≤": "<=", "≥": ">=", "·": ".", "µ": "u"}
_ERRORS = "sambasim.ascii"


def set_up() -> None:
    """Replace this process's standard streams. A stream that is not the original is left alone."""
    for number, (name, flags) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            _occupy(number, flags)
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode, encoding="utf-8"))
    codecs.register_error(_ERRORS, _in_ascii)
    if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
        sys.stdout = _replacement(sys.__stdout__, _Output(1))
    if sys.__stderr__ is not None and sys.stderr is sys.__stderr__:
        sys.stderr = _replacement(sys.__stderr__, _Output(2, goes_on=True, silent=True))


def survive_closed_stdout() -> None:
    """From now on the command goes on when its output cannot be written any more."""
    buffer = getattr(sys.stdout, "buffer", None)
    output = getattr(buffer, "raw", buffer)
    if isinstance(output, _Output):
        output.goes_on = True


def flush() -> None:
    """Write what is buffered. Raises what any write to stdout may: SystemExit or MachineError."""
    sys.stdout.flush()
    sys.stderr.flush()


class _Output(io.FileIO):
    """The descriptor `number`. Once it cannot be written, it is redirected to /dev/null."""

    def __init__(self, number: int, *, goes_on: bool = False, silent: bool = False) -> None:
        super().__init__(number, "w", closefd=False)
        self.goes_on = goes_on
        self._silent = silent

    def write(self, data: "ReadableBuffer", /) -> int:
        """Unless `goes_on`, raises SystemExit if the reader has exited, and MachineError if the disk is full."""
        try:
            return super().write(data)
        except OSError as error:
            _redirect_to_devnull(self.fileno(), os.O_WRONLY)
            self._handle(error)
        return memoryview(data).nbytes

    def _handle(self, error: OSError) -> None:
        gone = error.errno in (errno.EPIPE, errno.EIO)  # EIO: a terminal that was closed
        if self._silent or (gone and self.goes_on):
            return
        if gone:
            raise SystemExit(READER_GONE)
        what = f"standard output cannot be written any more: {error.strerror}"
        if not self.goes_on:
            raise MachineError(what, remedy="free space there, or redirect the output")
        print(f"warning: {what}; the run goes on", file=sys.stderr, flush=True)


def _replacement(stream: TextIO, output: _Output) -> TextIO:
    """A stream to `output` with the buffering and encoding of `stream`."""
    if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != output.fileno():
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        output if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(output),
        encoding=stream.encoding,
        errors=_ERRORS,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _occupy(number: int, flags: int) -> None:
    """Open the descriptor `number` if it is closed. Else the next file opened would get it, and what others print."""
    try:
        os.fstat(number)
    except OSError:
        _redirect_to_devnull(number, flags)


def _redirect_to_devnull(number: int, flags: int) -> None:
    opened = os.open(os.devnull, flags)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)


def _in_ascii(error: UnicodeError) -> tuple[str | bytes, int]:
    """The replacement of a character that the encoding of a stream lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character, after = error.object[error.start], error.start + 1
    if "\udc80" <= character <= "\udcff":  # a byte of a file name that is not text
        return bytes([ord(character) - 0xDC00]), after
    return _ASCII.get(character, "?"), after
