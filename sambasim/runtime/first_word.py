"""Of ranks that fail before they have found each other, the first one tells the error, and the others let it.

Some launchers end all ranks as soon as one has left with an error: if that is one that says nothing, nothing is said.
"""

import time
from collections.abc import Mapping

from sambasim.runtime.launcher import find_launcher

_TIME_TO_TELL_S = 2.0
"""Ranks of a node that fail alike do so within tenths of a second, on a busy machine in one or two (estimate)."""


def let_the_first_tell(environ: Mapping[str, str]) -> None:
    """For a rank that leaves its error to rank 0: return when that one has had time to tell it, if it needs any."""
    launcher = find_launcher(environ)
    if launcher is not None and launcher.rank > 0 and launcher.ends_at_first_failure:
        time.sleep(_TIME_TO_TELL_S)
