"""Limits for untrusted files: the size and nesting of text files, and the length and characters of quotes from them."""

import errno
import os
import stat
from pathlib import Path

from sambasim.units import MIB, format_bytes

LARGEST_TOML_BYTES = 4 * MIB

DEEPEST_TABLES = 32
"""Levels of tables and arrays in a TOML file; real ones have four."""

LARGEST_RECORDS_BYTES = 1024 * MIB
"""A run of three million steps."""

LONGEST_MESSAGE = 1000

LONGEST_LINE = 4000


def read_text(path: Path, most_bytes: int) -> str:
    """The text of the regular UTF-8 file at `path`. Raises OSError if it is no regular file or has more than
    `most_bytes`, UnicodeDecodeError if it is not UTF-8."""
    # Opening a pipe without O_NONBLOCK waits for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {format_bytes(most_bytes)}", str(path))
    return data.decode("utf-8").replace("\r\n", "\n")


def shortened(text: str) -> str:
    """`text`, or its beginning and end if it is long."""
    if len(text) <= LONGEST_MESSAGE:
        return text
    return f"{text[: LONGEST_MESSAGE // 2]} … {text[-LONGEST_MESSAGE // 2 :]}"


def printable(text: str, *, kept: str = "\n\t") -> str:
    """`text` with control characters and other unprintable ones escaped, apart from those in `kept`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """`text`, or its beginning if it is long, on one line without control characters."""
    spelled = printable(text[: LONGEST_LINE + 1], kept="")
    return spelled if len(spelled) <= LONGEST_LINE else f"{spelled[:LONGEST_LINE]}…"


def nests_too_deeply(tables: object) -> bool:
    """Whether the content of a TOML file has more than DEEPEST_TABLES levels of tables and arrays."""
    level: list[object] = [tables]
    for _ in range(DEEPEST_TABLES + 1):
        level = [inner for table in level if isinstance(table, dict) for inner in table.values()] + [
            inner for array in level if isinstance(array, list) for inner in array
        ]
    return bool(level)
