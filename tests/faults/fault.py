"""One kind of bad input, and the check that it is told well."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.command import sambasim

PEF_NAMES = ("net", "pair", "guess")
"""The PEFs that a row can ask for: trained alone; data parallel, -ws 2; for inference."""

MOST_LINES = 8
"""A message is a handful of lines: the longest list what is wrong, a line each."""

_JARGON = ("Traceback", "dynamo", "Dynamo", "FakeTensor", "fake tensor", "graph break", "aot_", "GuardOn", "proxy")


@dataclass(frozen=True, slots=True)
class Fault:
    """A command line, typed in a folder that holds `files` and `out/NAME/NAME.pef` for every one of `pefs`.

    `prepare` does to the folder what text cannot say. The message must hold the fragments `told`, in this order, where
    HERE stands for the folder's path. Nothing may be left but files of `may_leave`, which must not look complete.
    """

    name: str
    command: str
    exit_code: int
    told: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    pefs: tuple[str, ...] = ()
    prepare: Callable[[Path], object] | None = None
    may_leave: tuple[str, ...] = ()

    def check(self, folder: Path, compiled: Mapping[str, bytes]) -> None:
        """Lays the folder out, types the command, and looks at everything. `compiled` holds the PEFs by name."""
        self._lay_out(folder, compiled)
        before = contents(folder)
        outcome = sambasim(shlex.split(self.command), folder)
        message = message_of(outcome.stderr)
        assert_told(message, tuple(fragment.replace("HERE", str(folder)) for fragment in self.told))
        assert outcome.exit_code == self.exit_code, message
        check_form(message, outcome.stdout + outcome.stderr)
        check_left(folder, before, self.may_leave)

    def _lay_out(self, folder: Path, compiled: Mapping[str, bytes]) -> None:
        for name, text in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        for name in self.pefs:
            path = folder / "out" / name / f"{name}.pef"
            path.parent.mkdir(parents=True)
            path.write_bytes(compiled[name])
        if self.prepare:
            self.prepare(folder)


def message_of(stderr: str) -> str:
    """What is told of the error, without the progress before it."""
    before, mark, message = stderr.partition("error[")
    assert mark, f"no error was told: {stderr!r}"
    assert all(line.endswith("…") for line in before.splitlines()), f"something was said before the error: {before!r}"
    return mark + message


def assert_told(message: str, fragments: tuple[str, ...]) -> None:
    """Every fragment is in the message, in this order."""
    position = 0
    for fragment in fragments:
        found = message.find(fragment, position)
        assert found >= 0, f"{fragment!r} is not told, or not in this place:\n{message}"
        position = found + len(fragment)


def check_form(message: str, everything: str) -> None:
    """A message is one, short, without the jargon of tracers; and no traceback was shown."""
    assert everything.count("error[") == 1, everything
    assert len(message.splitlines()) <= MOST_LINES, message
    spoken = [word for word in _JARGON if word in everything]
    assert not spoken, f"{spoken} in {everything}"


def contents(folder: Path) -> Mapping[str, bytes | None]:
    """Every file with its bytes, and every folder with None."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def check_left(folder: Path, before: Mapping[str, bytes | None], may_leave: tuple[str, ...] = ()) -> None:
    """The folder is as before, but for files of `may_leave`, in which no summary says that a run was completed."""
    after = contents(folder)
    changed = {name for name in {*before, *after} if before.get(name, "none") != after.get(name, "none")}
    assert changed <= set(may_leave), f"left behind or changed: {sorted(changed)}"
    for name in changed:
        assert b'"summary"' not in (after[name] or b""), f"{name} looks complete"
