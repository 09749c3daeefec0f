"""What this process knows of its app: the command line, the ranks, what was reported and said. `reset` forgets all."""

import atexit
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sambasim.samba.findings import Code, Finding, Reporter, app_line

if TYPE_CHECKING:
    from sambasim.runtime.machine.communicator import Communicator

STARTED_IN = os.getcwd()
"""The folder in which the app was started; it may change it."""


@dataclass(slots=True)
class Context:
    """command, arguments: what `parse_app_args` returned
    communicator: None before the ranks are connected
    alone: whether the command runs in a single process
    has_left: whether `ending.leave` has reported an error, so that a later sys.exit is part of the same end
    said: the names that `notices.say_once` has told of
    parts: the job and the check of this process, by class
    """

    command: str | None = None
    arguments: Namespace | None = None
    communicator: "Communicator | None" = None
    alone: bool = False
    has_left: bool = False
    reporter: Reporter = field(default_factory=Reporter)
    said: set[str] = field(default_factory=set)
    parts: dict[type, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The rank of this process; 0 before the ranks are connected."""
        return 0 if self.communicator is None else self.communicator.rank

    @property
    def trains(self) -> bool:
        """Whether the app may train; measuring and testing run the same data everywhere, and need no such checks."""
        return self.command in (None, "run")

    def flag(self, name: str) -> Any:
        """The value of a flag of the command line; None without one."""
        return getattr(self.arguments, name, None)


_context = Context()

# Registered first, so that it runs last: after the final comparison of the ranks.
atexit.register(lambda: current().reporter.summarize())


def current() -> Context:
    return _context


def reset() -> None:
    """Begins anew, as a process whose command line nobody has read yet."""
    global _context
    _context = Context()


def report(finding: Finding | None, *, notice_only: bool = False) -> None:
    """`Reporter.report` of this process."""
    current().reporter.report(finding, notice_only=notice_only)


def report_here(code: Code, what: str, remedy: str, *, notice_only: bool = False) -> None:
    """Reports a finding at the line of the app that runs now."""
    report(Finding(code, what, app_line(), remedy), notice_only=notice_only)


def has_reported(*codes: str) -> bool:
    """Whether a finding with one of these codes was reported."""
    return any(map(current().reporter.has, codes))


def typed_command(original: Sequence[str] = tuple(sys.orig_argv)) -> list[str]:
    """The command line of this process, without mpirun: `["python", "app.py", "run", …]`, for messages."""
    interpreter, *rest = original
    is_installed = rest and Path(rest[0]).name == "sambasim"
    return ["sambasim", *rest[1:]] if is_installed else [interpreter, *rest]


def app_command() -> list[str] | None:
    """The words of the command line that start the app, `["python", "app.py"]`; None if it has no command."""
    words, command = typed_command(), current().command
    return words[: words.index(command)] if command in words else None


def compile_command() -> str:
    """The command line that compiles this app."""
    app = app_command()
    return f"{shlex.join(app)} compile …" if app else "samba.session.compile(model, inputs, optim, …)"
