"""Which PEFs this account compiled: for each, an empty file named by the PEF's digest.

    ${XDG_STATE_HOME:-~/.local/state}/sambasim/compiled-pefs/DIGEST

A digest covers all of a PEF: the program, the weights, the data source that it names. A PEF whose digest is recorded
holds what a compile on this account wrote, whoever owns the file now. Code and data that a PEF names are not covered.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

MOST_RECORDS = 10_000
"""Past this many, the older half is deleted; `run` then asks for --trust for those PEFs."""

_WRITABLE_BY_OTHERS = 0o022


def record_compiled(digest: str) -> str | None:
    """Record that this account compiled the PEF with this digest. Returns None, or why that failed."""
    try:
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / digest).touch(mode=0o600)
        records = list(os.scandir(folder))
        if len(records) > MOST_RECORDS:
            records.sort(key=lambda record: record.stat(follow_symlinks=False).st_mtime_ns)
            for record in records[: len(records) // 2]:
                Path(record).unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        return (error.strerror if isinstance(error, OSError) else None) or str(error)
    return None


def is_compiled_here(digest: str) -> bool:
    """Whether this account recorded that it compiled the PEF with this digest."""
    with suppress(OSError, RuntimeError):
        folder = _folder()
        for path in (folder, folder / digest):
            status = path.lstat()
            # What another account could have written proves nothing.
            if status.st_uid != os.getuid() or status.st_mode & _WRITABLE_BY_OTHERS:
                return False
        return re.fullmatch("[0-9a-f]{64}", digest) is not None
    return False


def _folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return Path(state or Path.home() / ".local" / "state") / "sambasim" / "compiled-pefs"
