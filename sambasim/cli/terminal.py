"""Output for people: on a terminal in its width and colours, and plain if it is piped."""

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
"""Columns of a table that is not written to a terminal."""

_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")


def is_terminal(stream: TextIO) -> bool:
    """Whether `stream` ends on a terminal.

    Some launchers give every rank a pseudo terminal and forward its output. Then the stream of the launcher decides; if
    it cannot be read, the answer is no.
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
    """`part` with control characters spelled out; rich removes only a few of them."""

    part: "RenderableType"

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.segment import Segment

        for text, style, control in console.render(self.part, options):
            yield Segment(text if control else printable(text), style, control)


def show(*parts: "RenderableType") -> None:
    """Print text and tables to stdout. If it is not a terminal: plain, wide and without trailing blanks."""
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
