"""Limits of what is read and typed: of the size and nesting of text files, of quotes from them, and of counts; the
version of JSON."""

import errno
import os
import stat
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from sambasim.units import MIB, format_bytes

T = TypeVar("T")

LARGEST_TOML_BYTES = 4 * MIB
DEEPEST_TABLES = 32  # levels of tables and arrays in a TOML file; real ones have four
LARGEST_RECORDS_BYTES = 1024 * MIB  # a run of three million steps
LONGEST_MESSAGE = 1000
LONGEST_LINE = 4000
LARGEST_COUNT = 10**9  # of steps, samples and the like: more than any run has
MOST_REPLICAS = 16_384  # more than any published job has; a placement lists each
MOST_MICRO_STEPS = 4096  # of one optimizer step: a prediction has a time for each section of each of them


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


class OtherFormat(Exception):
    """The `format` of a JSON file is another."""


class OtherVersion(Exception):
    """A JSON file has another `version`; `writer` is the program that wrote it."""

    def __init__(self, version: object, writer: object) -> None:
        quoted, self.writer = (ascii(text)[1:-1][:40] for text in (str(version), str(writer)))
        super().__init__(f"format {quoted}, written by {self.writer}")


class Misfit(Exception):
    """A JSON file does not have the keys and types that it should: where, and what is wrong."""


def parse_versioned(data: bytes, parse: Callable[[bytes], T], format_name: str, version: str) -> T:
    """What `parse`, of pydantic, makes of JSON whose keys `format` and `version` must be these, as `parse` checks too.
    Raises OtherFormat, OtherVersion or Misfit."""
    try:
        return parse(data)
    except ValueError as error:
        from pydantic import ValidationError
        from pydantic_core import from_json

        try:
            head: Any = from_json(data)
        except ValueError:
            head = None
        if isinstance(head, dict) and head.get("format") != format_name:
            raise OtherFormat from None
        if isinstance(head, dict) and head.get("version") != version:
            raise OtherVersion(head.get("version"), head.get("writer")) from None
        fault = error.errors(include_url=False, include_input=False)[0] if isinstance(error, ValidationError) else None
        if fault is None:
            raise
        where = ".".join(map(str, fault["loc"]))
        raise Misfit(f"{where or 'the whole'}: {fault['msg']}") from error


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
        inner = (list(outer.values()) if isinstance(outer, dict) else outer for outer in level)
        level = list(chain.from_iterable(values for values in inner if isinstance(values, list)))
    return bool(level)
