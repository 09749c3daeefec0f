"""What a command writes: standard streams that do not fail, tables, progress phases, and errors.

    stream closed from the start   output is discarded, input is empty
    the reader has exited          the command exits quietly with 141, which is 128 + SIGPIPE; training goes on without
                                   output, so that its results are saved
    the disk is full               the command reports it and exits; training warns once, and goes on
    an encoding that lacks ×       the character is written as an escape, \\xd7

A failure of stderr never ends a command: the exit code still says what happened.
"""

import errno
import io
import os
import select
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple, TextIO

from sambasim.errors import Interrupted, MachineError, SambasimError, exit_code, one_line, printable, say
from sambasim.runtime.machine.launcher import find_launcher

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from sambasim.records.metrics import EvaluationRecord, InferenceRecord

READER_GONE = 141

_DIGITS = 6  # of COLUMNS: more would be no width
_PIPED_WIDTH, _FALLBACK_WIDTH, _LEAST_WIDTH = 200, 80, 40


def set_up_streams() -> None:
    """Replace this process's standard streams. A stream that is not the original is left alone."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            flags, mode = (os.O_WRONLY, "w") if number else (os.O_RDONLY, "r")
            try:
                os.fstat(number)
            except OSError:  # closed: the next file that is opened would get what others print
                _redirect_to_devnull(number, flags)
            setattr(sys, name, os.fdopen(os.open(os.devnull, flags), mode, encoding="utf-8"))
    for number, name in ((1, "stdout"), (2, "stderr")):
        original = getattr(sys, f"__{name}__")
        if original is not None and getattr(sys, name) is original:
            setattr(sys, name, _replacement(original, _Output(number)))


def survive_closed_stdout() -> None:
    """From now on the command goes on when its output cannot be written any more."""
    buffer = getattr(sys.stdout, "buffer", None)
    output = getattr(buffer, "raw", buffer)
    if isinstance(output, _Output):
        output.goes_on = True


class _Output(io.FileIO):
    """Stdout or stderr by its descriptor. Once it cannot be written, it is redirected to /dev/null."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self.goes_on = False

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write all of `data`: a pipe may take a part of it, and an unbuffered stream would drop the rest. For stdout,
        unless `goes_on`: SystemExit if the reader has exited, MachineError if the disk is full."""
        left = memoryview(data).cast("B")
        try:
            while left:
                written = super().write(left)
                if written is None:  # a full pipe that does not block
                    select.select([], [self], [])
                else:
                    left = left[written:]
        except OSError as error:
            _redirect_to_devnull(self.fileno(), os.O_WRONLY)
            what = f"standard output cannot be written any more: {error.strerror}"
            reader_gone = error.errno in (errno.EPIPE, errno.EIO)  # EIO: a terminal that was closed
            if self.fileno() == 1 and not self.goes_on:
                if reader_gone:
                    raise SystemExit(READER_GONE) from None
                raise MachineError(what, remedy="free space there, or redirect the output") from None
            if self.fileno() == 1 and not reader_gone:
                print(f"warning: {what}; the run goes on", file=sys.stderr, flush=True)
        return memoryview(data).nbytes


def _replacement(stream: TextIO, output: _Output) -> TextIO:
    """A copy of `stream` that writes to `output`; `stream` itself if it is not of that file descriptor."""
    if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != output.fileno():
        return stream
    with suppress(OSError):
        stream.flush()
    buffer = output if isinstance(stream.buffer, io.RawIOBase) else io.BufferedWriter(output)
    as_before = stream.line_buffering, stream.write_through
    return io.TextIOWrapper(buffer, stream.encoding, "backslashreplace", None, *as_before)


def _redirect_to_devnull(number: int, flags: int) -> None:
    opened = os.open(os.devnull, flags)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)


def is_terminal(stream: TextIO) -> bool:
    """Whether `stream` ends on a terminal: its own, or that of the mpirun that forwards it. Open MPI gives every rank a
    pseudo terminal, whatever it forwards to."""
    launcher = find_launcher()
    if launcher is None or (stream.isatty() and not launcher.is_open_mpi):
        return stream.isatty()
    return _terminal_of_launcher(stream) is not None


def _terminal_of_launcher(stream: TextIO) -> str | None:
    """The terminal to which mpirun, an ancestor of this process, writes what it forwards of `stream`. None for another
    stream than those of mpirun, such as one that a shell has redirected."""
    process, is_forwarded = os.getppid(), stream.isatty()
    with suppress(OSError, ValueError):
        number = stream.fileno()
        own = os.readlink(f"/proc/self/fd/{number}")
        while process >= 1 and number in (1, 2):
            with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
            if name.startswith(("mpirun", "mpiexec", "srun", "prterun", "orterun")):
                target = os.readlink(f"/proc/{process}/fd/{number}")
                on_terminal = target.startswith(("/dev/pts/", "/dev/tty", "/dev/console"))
                return target if is_forwarded and on_terminal else None
            # The other end of a rank's pipe has the same name, and is held by the helper of mpirun on this host.
            held = (os.readlink(descriptor) for descriptor in os.scandir(f"/proc/{process}/fd"))
            is_forwarded = is_forwarded or (own.startswith(("pipe:", "socket:")) and own in held)
            process = int(rest.split()[1])  # its parent
    return None


def terminal_width(stream: TextIO) -> int:
    """Columns of the terminal on which `stream` ends; for a pipe, COLUMNS, and 200 without it."""
    asked = os.environ.get("COLUMNS", "")
    if asked.isdecimal() and len(asked) < _DIGITS and int(asked) > 0:
        return max(int(asked), _LEAST_WIDTH)
    if not is_terminal(stream):
        return _PIPED_WIDTH
    columns = 0
    with suppress(OSError), open(_terminal_of_launcher(stream) or os.ttyname(stream.fileno()), "rb") as own:
        columns = os.get_terminal_size(own.fileno()).columns
    return columns or _FALLBACK_WIDTH


def console_of(stream: TextIO, file: TextIO | None = None) -> "Console":
    """A console for `stream`, or for `file` in its place, with colours if it ends on a terminal, also under mpirun."""
    from rich.console import Console

    on_terminal, width = is_terminal(stream), terminal_width(stream)
    return Console(
        file=file or stream, width=width, force_terminal=on_terminal, force_jupyter=False, highlight=False, emoji=False
    )


class _Printable(NamedTuple):
    """`part` with control characters escaped; rich removes only a few of them."""

    part: "RenderableType"

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.segment import Segment

        for text, style, control in console.render(self.part, options):
            yield Segment(text if control else printable(text), style, control)


def show(*parts: "RenderableType") -> None:
    """Print text and tables to stdout. If it is not a terminal: plain, wide and without trailing blanks."""
    piped = None if is_terminal(sys.stdout) else io.StringIO()
    console = console_of(sys.stdout, piped)
    for part in parts:
        shown = printable(part) if isinstance(part, str) else _Printable(part)
        console.print(shown, markup=False, soft_wrap=isinstance(part, str))
    for line in piped.getvalue().splitlines() if piped else ():
        print(line.rstrip())


def scores(found: "EvaluationRecord | InferenceRecord") -> list[str]:
    """What is known of an evaluation, in words."""
    forms = {"loss": ".4f", "accuracy": ".2%"}
    return [f"{printable(name)} {value:{forms.get(name, '.4g')}}" for name, value in found.numbers.items()]


@contextmanager
def phases(quiet: bool) -> Iterator[Callable[[str], None]]:
    if quiet:
        yield lambda phase: None
    elif is_terminal(sys.stderr):
        with console_of(sys.stderr).status("starting") as status:
            yield lambda phase: status.update(f"{phase} …")
    else:
        yield lambda phase: say(f"{phase} …", sys.stderr)


def report_error(error: BaseException, reporter: str | None = None, details: Sequence[tuple[str, str]] = ()) -> None:
    """Print `error`, and below it `details`, each a title and a text. `reporter` is the rank and host that report; None
    before the ranks have connected: then rank 0 prints and ends the job, or, if it has not failed, another rank."""
    launcher = find_launcher() if reporter is None else None
    if launcher is not None and launcher.rank > 0:
        if isinstance(error, Interrupted | KeyboardInterrupt) or not launcher.wait_for_report_s:
            launcher.end_job(exit_code(error))
            return
        time.sleep(launcher.wait_for_report_s)
        reporter = f"rank {launcher.rank} on {os.uname().nodename}"
    who = f" ({reporter})" if reporter else ""
    match error:
        case Interrupted():
            text = str(error)
        case SambasimError():
            text = f"error[{error.code}]{who}: {error}"
        case KeyboardInterrupt():
            text = f"interrupted{who}"
        case _:
            trace, what = "".join(traceback.format_exception(error)), one_line(str(error))
            text = f"{trace}error[internal]{who}: this is a bug in sambasim, please report it: {what}"
    say("\n".join([text, *(f"  {title + ':':<6} {detail}" for title, detail in details)]), sys.stderr)
    if launcher is not None:
        launcher.end_job(exit_code(error))
