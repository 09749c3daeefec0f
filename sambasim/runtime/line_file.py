"""Text files of which no half is left when the disk fills: one grows by whole lines, one is there at once."""

import os
from contextlib import suppress
from pathlib import Path


class LineFile:
    """The file at `path`, in UTF-8: empty, or what it was where `keeps`. Its folder is made. Every line is there at
    once for others to read.

    Raises OSError if it cannot be opened; `write` does if the line cannot be written, and leaves none of it behind.
    """

    def __init__(self, path: Path, *, keeps: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what could not be written must not come out later.
        self._file = path.open("ab" if keeps else "wb", buffering=0)

    def write(self, lines: str) -> None:
        """Add `lines`, with their ends."""
        whole = os.fstat(self._file.fileno()).st_size
        left = memoryview(lines.encode("utf-8", errors="backslashreplace"))
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            with suppress(OSError):  # a pipe or a device has no length
                self._file.truncate(whole)
            raise

    def close(self) -> None:
        """No more will be written."""
        self._file.close()


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all, and the folders that it lies in. Raises OSError.

    What a link leads to is written in place: the link may be /dev/stdout.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):  # a link, a device or a pipe
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
