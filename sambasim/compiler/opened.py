"""Files that a call opens: what it reads there is in no tensor, so a PEF has what it gave for the example batch."""

import contextlib
import sys
from collections.abc import Iterator

from sambasim.compiler.recording import running_line

_CODE = (".py", ".pyc", ".so")

_seen: dict[str, None] | None = None
_is_listening = False


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    global _seen
    if event != "open" or _seen is None or str(arguments[0]).endswith(_CODE):
        return
    seen, _seen = _seen, None  # to find the line opens its file
    line = running_line()
    if line is not None:
        seen[f"{arguments[0]}, at {line}"] = None
    _seen = seen


@contextlib.contextmanager
def files_seen(files: dict[str, None]) -> Iterator[None]:
    """While this is open, files that the user's code opens are added to `files`, with the line."""
    global _seen, _is_listening
    if not _is_listening:  # Python has no way to take it back
        sys.addaudithook(_hear)
        _is_listening = True
    _seen = files
    try:
        yield
    finally:
        _seen = None
