"""What may be a stranger's is bounded: text files in size and nesting, and what is said of them in length and in
characters."""

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from sambasim.units import MIB, format_bytes

LARGEST_TOML_BYTES = 4 * MIB
"""A config has some fifty lines, and a device too."""

DEEPEST_TABLES = 32
"""Levels of tables and arrays in a TOML file; real ones have four."""

LARGEST_RECORDS_BYTES = 1024 * MIB
"""A run of three million steps."""


def read_text(path: Path, most_bytes: int) -> str:
    """The text of the regular file at `path`, which is UTF-8.

    Raises OSError, whose `strerror` says why, for what is no regular file (a pipe would be waited for, a device never
    ends) and for more than `most_bytes`; UnicodeDecodeError for other text.
    """
    # Opening a pipe without O_NONBLOCK waits for who writes to it.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {format_bytes(most_bytes)}", str(path))
    return data.decode("utf-8").replace("\r\n", "\n")


LONGEST_FAULT = 1000
"""Characters of what is said of a file; names in it can be as long as the file."""


def shortened(text: str) -> str:
    """`text`, or its beginning and end."""
    if len(text) <= LONGEST_FAULT:
        return text
    return f"{text[: LONGEST_FAULT // 2]} … {text[-LONGEST_FAULT // 2 :]}"


def printable(text: str, *, kept: str = "\n\t") -> str:
    """`text` with everything that a terminal would obey, and not show, spelled out; not so what is `kept`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


LONGEST_LINE = 4000
"""Characters of a line that quotes a file."""


def one_line(text: str) -> str:
    """`text`, or its beginning, on one line that a terminal shows as it is."""
    spelled = printable(text[: LONGEST_LINE + 1], kept="")
    return spelled if len(spelled) <= LONGEST_LINE else f"{spelled[:LONGEST_LINE]}…"


def nests_too_deeply(tables: object) -> bool:
    """Whether there are more than DEEPEST_TABLES levels of tables and arrays in what a TOML file says."""
    level: list[object] = [tables]
    for _ in range(DEEPEST_TABLES + 1):
        level = [inner for item in level for inner in _inside(item)]
    return bool(level)


def _inside(item: object) -> Iterable[object]:
    if isinstance(item, dict):
        return item.values()
    return item if isinstance(item, list) else ()
