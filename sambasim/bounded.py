"""Text files that somebody names: read only if they are files, and no larger than any of their kind has to be."""

import errno
import os
import stat
from pathlib import Path

from sambasim.units import MIB, format_bytes

LARGEST_TOML_BYTES = 4 * MIB
"""A config has some fifty lines, and a device too."""

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
