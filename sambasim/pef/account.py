"""Which PEFs were compiled on this account: their digests, one a line, in a file of the account's own.

    ${XDG_STATE_HOME:-~/.local/state}/sambasim/compiled

A digest covers all of a PEF: the program, the weights, the data source that it names. So a PEF whose digest is here
holds what a compile on this account wrote, letter for letter, whoever owns the file and whatever way it came; and one
whose digest is not here may hold anything. What lies *behind* a name (the module, the data file) is in no digest: it is
read from where the name leads today, as it was when this account compiled it.

The file is a note, and no proof: who can write in the account's home can do worse than add a line to it.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

DIGEST_CHARACTERS = 64
MOST_DIGESTS = 10_000
"""The oldest lines are dropped past this: 650 kB."""

_LINE_BYTES = DIGEST_CHARACTERS + 1
_FEWEST_KEPT = MOST_DIGESTS // 2
_FILE_MODE, _FOLDER_MODE = 0o600, 0o700


def note_compiled(digest: str) -> str | None:
    """Notes that the PEF with this digest was compiled here. Returns None, or why it could not be noted.

    Several processes may do so at once: a line is one write to the file's end.
    """
    try:
        path = _path()
        path.parent.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, _FILE_MODE)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                return f"{path} is no file of this account"
            os.write(descriptor, f"{digest}\n".encode())
            if status.st_size > MOST_DIGESTS * _LINE_BYTES:
                _drop_oldest(path, descriptor)
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError) as error:  # the latter for a user without a home
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    return None


def is_compiled_here(digest: str) -> bool:
    """Whether the PEF with this digest was compiled on this account, as far as its file tells."""
    with suppress(OSError, RuntimeError):
        descriptor = os.open(_path(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            # What another account could have written says nothing.
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
                return len(digest) == DIGEST_CHARACTERS and digest.encode() in _lines(descriptor)
        finally:
            os.close(descriptor)
    return False


def _path() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return Path(state or Path.home() / ".local" / "state") / "sambasim" / "compiled"


def _lines(descriptor: int) -> list[bytes]:
    """The last lines, oldest first: all that are kept, and those that were added while others were dropped."""
    size = os.fstat(descriptor).st_size
    most = 2 * MOST_DIGESTS * _LINE_BYTES
    return os.pread(descriptor, most, max(size - most, 0)).split(b"\n")


def _drop_oldest(path: Path, descriptor: int) -> None:
    """Puts a file with the newer half of the lines in the place of this one.

    A process that adds its line to the old file meanwhile loses it: its next run asks for --trust, no more.
    """
    kept = [line for line in _lines(descriptor) if len(line) == DIGEST_CHARACTERS][-_FEWEST_KEPT:]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)
        try:
            os.write(new, b"".join(line + b"\n" for line in kept))
        finally:
            os.close(new)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
