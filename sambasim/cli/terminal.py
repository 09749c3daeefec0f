"""Whether a person looks at what this process writes, and what is shown to one, or to a pipe."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from sambasim.bounded import printable
from sambasim.runtime.launcher import find_launcher

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_PIPED_WIDTH = 200
"""Columns of a table that nobody's terminal limits."""

_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")


def is_terminal(stream: TextIO) -> bool:
    """Whether what is written to `stream` comes to a terminal.

    Some launchers give every rank a terminal of its own and hand on what it writes; then it is the launcher's stream
    that counts, and one that cannot be looked at is none.
    """
    if not stream.isatty():
        return False
    launcher = find_launcher(os.environ)
    if launcher is None or not launcher.gives_terminals:
        return True
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/{stream.fileno()}").startswith(_TERMINALS)
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class _Printable:
    """What `part` shows, made printable; rich takes out a few control characters only."""

    part: "RenderableType"

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.segment import Segment

        for text, style, control in console.render(self.part, options):
            yield Segment(text if control else printable(text), style, control)


def show(*parts: "RenderableType") -> None:
    """Print each to stdout, text as it is. To a terminal in its width and colours; to anything else plain and wide,
    without blanks at the ends of lines."""
    from rich.console import Console

    if is_terminal(sys.stdout):
        console = Console(highlight=False)
    else:
        console = Console(file=io.StringIO(), width=_PIPED_WIDTH, force_terminal=False, highlight=False)
    for part in parts:
        shown = printable(part) if isinstance(part, str) else _Printable(part)
        console.print(shown, markup=False, soft_wrap=isinstance(part, str))
    if isinstance(console.file, io.StringIO):
        for line in console.file.getvalue().splitlines():
            print(line.rstrip())


@contextmanager
def phases(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A callback that shows the current phase of a compilation on standard error."""
    if quiet:
        yield lambda phase: None
    elif is_terminal(sys.stderr):
        from rich.console import Console

        console = Console(file=sys.stderr)  # also while tests or traces redirect it
        with console.status("starting") as status:
            yield lambda phase: status.update(f"{phase} …")
    else:
        yield lambda phase: print(f"{phase} …", file=sys.stderr, flush=True)
