"""What this process knows of its app: its command line, ranks, findings (mistakes of the app) and notices.

In a run a finding is a notice on stderr or, for DP09, an error. `sambasim app --check` collects all of them. The codes
are in `samba/README.md`.
"""

import atexit
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from sambasim.compiler.capture.recording import line_of
from sambasim.errors import DataParallelError, SambasimError, one_line, say
from sambasim.runtime.machine.launcher import launched_rank
from sambasim.units import counted
from sambasim.whose_code import PACKAGE, is_ours, is_users_file

if TYPE_CHECKING:
    from sambasim.runtime.machine.communicator import Communicator


Code: TypeAlias = Literal[
    "DP01", "DP02", "DP03", "DP04", "DP05", "DP06", "DP07", "DP08", "DP09",
    "AP01", "AP02", "AP03", "AP04", "AP05", "AP06", "AP07", "AP08", "AP09",
]  # fmt: skip
"""The kinds of mistakes. AP01, and AP04 and AP09 of some kinds, are errors with the code in their text."""

Failure = TypeVar("Failure", bound=SambasimError)
Part = TypeVar("Part")


def print_notice(text: str) -> None:
    """On standard error, of rank 0."""
    if launched_rank() == 0:
        say(f"notice: {text}", sys.stderr)


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong, where in the app (`file:line: code`), and what to type there."""

    code: Code
    what: str
    where: str | None
    remedy: str

    @property
    def words(self) -> str:
        return f"{self.code}: {self.what}"

    def shown_as(self, start: str, *, short: bool = False) -> str:
        """What it is after `start`, where and the remedy in lines of their own; in `short` the first line alone."""
        where = one_line(self.where or "")
        if short:
            return f"{start}: {one_line(self.what)}" + (f" ({where.partition(': ')[0]})" if where else "")
        place = f"\n  where: {where}" if where else ""
        return f"{start}: {one_line(self.what)}{place}\n  try:   {one_line(self.remedy)}"


@dataclass(slots=True)
class Reporter:
    """Reports findings in this process: each once when it is found, and all again in a summary at the end."""

    on_demand: bool = False  # collect findings for a `--check`, print nothing and raise nothing
    at_exit: bool = False  # the run is over, so new findings appear in the summary only
    _found: dict[tuple[str, str], tuple[Finding, str, bool]] = field(default_factory=dict)  # the last: was it printed

    @property
    def findings(self) -> Sequence[Finding]:
        """The findings of this rank so far, each once."""
        return tuple(finding for finding, *_ in self._found.values())

    def report(self, finding: Finding | None, *, notice_only: bool = False) -> None:
        """Report a finding of this rank; rank 0 prints it. Raises DataParallelError for one that ends the run, but not
        during a check, and not with `notice_only`, because the run is over or can go on."""
        if finding is not None:
            if finding.code == "DP09" and not (self.on_demand or notice_only):
                raise DataParallelError(finding.words, where=finding.where, remedy=finding.remedy)
            self._add(finding)

    def report_from(self, rank: int, findings: Sequence[Finding]) -> None:
        """Report those findings of another rank that this rank does not have."""
        for finding in findings:
            self._add(finding, f" (rank {rank})")

    def has(self, *codes: str) -> bool:
        """Whether a finding with one of these codes was reported."""
        return any(reported in codes for reported, _ in self._found)

    def summarize(self) -> None:
        """Print all findings again, on rank 0: in short those that were printed before."""
        if self._found and not self.on_demand and launched_rank() == 0:
            lines = [f"summary: {counted(len(self._found), 'finding')}; sambasim app --check checks every step"]
            for finding, source, is_printed in self._found.values():
                lines.append(finding.shown_as(f"  {finding.code}{source}", short=is_printed))
            sys.stdout.flush()
            say("\n".join(lines), sys.stderr)

    def _add(self, finding: Finding, source: str = "") -> None:
        key = finding.code, finding.what
        if key in self._found:
            return
        prints = not (self.on_demand or self.at_exit) and launched_rank() == 0
        self._found[key] = finding, source, prints
        if prints:
            say(finding.shown_as(f"notice{source}: {finding.code}"), sys.stderr)


_CHECKS = (__file__, f"{PACKAGE}samba/checks/")
_STARTERS = tuple(f"{PACKAGE}{name}" for name in ("cli/", "samba/shim/", "samba/ending.py", "__main__.py"))


def app_line() -> str | None:
    """`file:line: code` of the innermost frame that belongs to no library; None if there is none."""
    of_app = (frame for frame in _frames() if is_users_file(frame.f_code.co_filename))
    return next(map(_shown, of_app), None)


def app_error(kind: type[Failure], what: str, remedy: str) -> Failure:
    """An error with the line of the app, to be raised."""
    return kind(what, where=app_line(), remedy=remedy)


def type_error(kind: type[Failure], what: str, value: object, remedy: str) -> Failure:
    """As `app_error`, for a `value` of a wrong type: "`what`, not list"."""
    return app_error(kind, f"{what}, not {type(value).__name__}", remedy)


def own_line_of_app() -> str | None:
    """As `app_line`; None if the call goes through sambasim."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if is_ours(file) and not file.startswith(_CHECKS):
            return None
        if is_users_file(file):
            return _shown(frame)
    return None


def is_called_by_app() -> bool:
    """Whether no frame of sambasim is on the stack, apart from the checks and what started the app."""
    files = (frame.f_code.co_filename for frame in _frames())
    return not any(is_ours(file) and not file.startswith((*_CHECKS, *_STARTERS)) for file in files)


def _frames() -> Iterator[FrameType]:
    return (frame for frame, _ in walk_stack(sys._getframe(1)))  # the innermost first


def _shown(frame: FrameType) -> str:
    return line_of(os.path.normpath(frame.f_code.co_filename), frame.f_lineno)


STARTED_IN = os.getcwd()  # the folder in which the app was started; it may change it


@dataclass(slots=True)
class Context:
    """What this process knows of its app; command and arguments are those of `parse_app_args`."""

    command: str | None = None
    arguments: Namespace | None = None
    communicator: "Communicator | None" = None  # None before the ranks are connected
    alone: bool = False  # the command runs in a single process
    has_run: bool = False  # whether sections of a PEF were run
    has_left: bool = False  # `ending.leave` has reported an error; a later sys.exit is part of the same end
    reporter: Reporter = field(default_factory=Reporter)
    said: set[str] = field(default_factory=set)  # what `notices.say_once` and compiles have told of
    parts: dict[type, Any] = field(default_factory=dict)  # the `checks.job.Job` and Check of this process

    @property
    def rank(self) -> int:
        """The rank of this process; 0 before the ranks are connected."""
        return 0 if self.communicator is None else self.communicator.rank

    @property
    def world_size(self) -> int:
        """The number of ranks; 1 before they are connected, and in a single process."""
        return 1 if self.communicator is None else self.communicator.world_size

    @property
    def trains(self) -> bool:
        """Whether the app may train; measuring and testing run the same data everywhere, and need no such checks."""
        return self.command in (None, "run")

    def part(self, kind: type[Part]) -> Part | None:
        return self.parts.get(kind)

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
