"""Python's garbage collector, out of the way of a capture.

A trace makes a million objects that live until its end. The collector looks through all of them again and again, and
through torch's own, and finds nothing.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (50_000, 20, 100)
"""Instead of Python's (700, 10, 10): what a trace does drop in cycles is still found, 70 times more rarely."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """While this is active, collections are rare, and pass over what was there before.

    Where something is frozen already, as a command's imports are, nothing more is: to thaw it would thaw them too.
    """
    thresholds = gc.get_threshold()
    is_thawed = gc.get_freeze_count() == 0
    if is_thawed:
        gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if is_thawed:
            gc.unfreeze()
