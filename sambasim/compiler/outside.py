"""What a call does outside of Python: a PEF has what a file gave for the example batch, and does nothing of it."""

import contextlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from sambasim.compiler.recording import running_line

_DONE = ("os.", "shutil.", "socket.", "subprocess.")
_READ = ("os.listdir", "os.scandir", "os.walk", "os.fwalk")  # as an import does
_seen: "Outside | None" = None


@dataclass(frozen=True, slots=True)
class Outside:
    """What the user's code has opened, and what else it has done, each with its line."""

    opened: dict[str, None] = field(default_factory=dict)
    done: dict[str, None] = field(default_factory=dict)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """While this is open, what the user's code does is added. What it prints is dropped."""
        global _seen
        _seen = self
        try:
            with contextlib.redirect_stdout(_Told("stdout")), contextlib.redirect_stderr(_Told("stderr")):
                yield
        finally:
            _seen = None

    def add(self, seen: dict[str, None], what: str) -> None:
        global _seen
        _seen = None  # to find the line opens its file
        if (line := running_line()) is not None:
            seen[f"{what}, at {line}"] = None
        _seen = self


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if _seen is not None and event == "open" and not str(arguments[0]).endswith((".py", ".pyc", ".so")):
        _seen.add(_seen.opened, str(arguments[0]))
    elif _seen is not None and event.startswith(_DONE) and event not in _READ:
        _seen.add(_seen.done, event)


sys.addaudithook(_hear)


class _Told(io.StringIO):
    """Has the name of its stream for a value."""

    def write(self, text: str, /) -> int:
        if _seen is not None:
            _seen.add(_seen.done, f"output to {self.getvalue()}")
        return len(text)
