"""The user's line at which something changes."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from sambasim.compiler.names import is_library_file
from sambasim.compiler.recording import line_of

_ROUNDS = 4


def changing_line(
    run: Callable[[int], object], watched: Callable[[], object], begin: int, stride: int
) -> tuple[int, str | None]:
    """Calls `run` with 1, 2 … until `watched` gives something else, asked every `stride` events of Python's trace from
    `begin` on. Returns the last event without a change, and the line before the look that found one."""
    before, count, seen, number = watched(), 0, begin, 0
    last: tuple[str, int] | None = None
    found: list[str | None] = []

    def look(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal last, count, seen
        if found or is_library_file(frame.f_code.co_filename):
            return None
        count += 1
        if count >= seen + stride:
            if watched() != before:
                found.append(None if last is None else line_of(*last))
            else:
                seen = count
        if last is None or "-packages" not in frame.f_code.co_filename or "-packages" in last[0]:
            last = frame.f_code.co_filename, frame.f_lineno
        return look

    sys.settrace(look)
    try:
        while not found and (number := number + 1) < _ROUNDS:
            run(number)
    finally:
        sys.settrace(None)
    return seen, found[0] if found else None
