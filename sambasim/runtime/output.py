"""Text that a run writes: whole lines on the streams that ranks share, and files without half a line on a full disk."""

import io
import os
import sys
from contextlib import suppress
from pathlib import Path


def print_whole_lines() -> None:
    """Write each printed line by one call, also with PYTHONUNBUFFERED: mpirun mixes what its ranks write."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


class LineFile:
    """A text file in UTF-8 that grows by whole lines, which others can read at once. Its folder is created.

    keeps: append to an existing file instead of emptying it

    Raises OSError if it cannot be opened.
    """

    def __init__(self, path: Path, *, keeps: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what could not be written must not be written later.
        self._file = path.open("ab" if keeps else "wb", buffering=0)

    def write(self, lines: str) -> None:
        """Add `lines`, with their ends. Raises OSError if that fails, and then removes what was written of them."""
        size = os.fstat(self._file.fileno()).st_size
        left = memoryview(lines.encode("utf-8", errors="backslashreplace"))
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            with suppress(OSError):  # a pipe or a device has no length
                self._file.truncate(size)
            raise

    def close(self) -> None:
        self._file.close()


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all, and create its folder. Raises OSError.

    The target of a link is written in place: it may be /dev/stdout.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_text(text, encoding="utf-8")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
