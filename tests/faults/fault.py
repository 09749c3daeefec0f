"""One kind of bad input, and the check of what is reported."""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.faults.command import Outcome, outcome_of, sambasim
from tests.support.mpi import SAMBASIM, run_mpi

MAX_LINES = 8
_JARGON = ("Traceback", "dynamo", "Dynamo", "FakeTensor", "fake tensor", "graph break", "aot_", "GuardOn", "proxy")


@dataclass(frozen=True, slots=True)
class Fault:
    """A command line, typed in a folder that holds net.py with the text `net`, and the PEF that the command names.

    The message must contain what stands between the dots of `says`, in this order; HERE stands for the folder's path.
    Only files of `may_leave` may be left, and must not look complete. With `ranks`, so many processes under mpirun run
    the command, and report one error.
    """

    command: str
    says: str
    net: str | None = None
    prepare: Callable[[Path], object] | None = None
    may_leave: tuple[str, ...] = ()
    ranks: int = 0
    name: str = ""

    def check(self, folder: Path, compiled: Mapping[str, bytes]) -> None:
        """Run the command in `folder`; `compiled` are the PEFs by name."""
        if self.net is not None:
            (folder / "net.py").write_text(self.net)
        if named := re.search(r"--pef (\w+)(?= |$)", self.command):
            path = folder / "out" / named[1] / f"{named[1]}.pef"
            path.parent.mkdir(parents=True)
            path.write_bytes(compiled[named[1]])
        if self.prepare:
            self.prepare(folder)
        before = contents(folder)
        words = shlex.split(self.command)
        if self.ranks:
            still = {"PYTHONDONTWRITEBYTECODE": "1"}
            outcome = outcome_of(run_mpi(self.ranks, [*SAMBASIM, *words], cwd=folder, env=still, timeout=120))
        else:
            outcome = sambasim(words, folder)
        check_message(outcome, self.says.replace("HERE", str(folder)))
        check_left(folder, before, self.may_leave)


def check_message(outcome: Outcome, says: str) -> str:
    """There is one short error message, which says that, and no traceback, and its exit code. Returns it."""
    before, mark, rest = outcome.stderr.partition("error[")
    assert mark, f"no error was reported: {outcome.stderr!r}"
    assert all(line.endswith("…") for line in before.splitlines()), f"output before the error: {before!r}"
    message, everything = mark + rest, outcome.stdout + outcome.stderr
    assert_contains(message, says)
    assert outcome.exit_code == (3 if message.startswith(("error[pef]", "error[weights]")) else 2), message
    assert everything.count("error[") == 1, everything
    assert len(message.splitlines()) <= MAX_LINES, message
    jargon = [word for word in _JARGON if word in everything]
    assert not jargon, f"{jargon} in {everything}"
    return message


def assert_contains(message: str, says: str) -> None:
    position = 0
    for fragment in says.split(" ... "):
        found = message.find(fragment, position)
        assert found >= 0, f"{fragment!r} is not there, or not in this place:\n{message}"
        position = found + len(fragment)


def contents(folder: Path) -> Mapping[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def check_left(folder: Path, before: Mapping[str, bytes | None], may_leave: tuple[str, ...] = ()) -> None:
    """The folder is as before, but for files of `may_leave`, in which no summary says that a run was completed."""
    after = contents(folder)
    changed = {name for name in {*before, *after} if before.get(name, "none") != after.get(name, "none")}
    assert changed <= set(may_leave), f"left behind or changed: {sorted(changed)}"
    for name in changed:
        assert b'"summary"' not in (after[name] or b""), f"{name} looks complete"
