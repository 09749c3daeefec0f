"""The line of Python that a thread is in: the user's own, if there is one."""

import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

_OURS = str(Path(__file__).resolve().parents[2])


def line_of(frame: FrameType | None, not_user: Sequence[str] | None = None) -> str:
    """`FILE:LINE in FUNCTION` of the innermost frame of the user's code, counted from `frame` outwards; nothing where
    none of it is the user's.

    not_user: folders whose files are not the user's: sambasim, Python and its packages if not said
    """
    folders = _not_user() if not_user is None else not_user
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", *folders)):
            return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def _not_user() -> Sequence[str]:
    paths = sysconfig.get_paths()
    libraries = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    # A command that pip has installed is a script beside the Python that runs it.
    return [_OURS, *libraries, str(Path(sys.executable).parent)]
