"""Whether a person looks at what this process writes."""

import os
from typing import TextIO

from sambasim.runtime.launcher import find_launcher

_TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")


def is_terminal(stream: TextIO) -> bool:
    """Whether what is written to `stream` comes to a terminal.

    Some launchers give every rank a terminal of its own and hand on what it writes; then it is the launcher's stream
    that counts, and one that cannot be looked at is none.
    """
    if not stream.isatty():
        return False
    launcher = find_launcher(os.environ)
    if launcher is None or not launcher.gives_terminals:
        return True
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/{stream.fileno()}").startswith(_TERMINALS)
    except OSError:
        return False
