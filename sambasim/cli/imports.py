"""Imports that stay out of the way of Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_imports() -> Iterator[None]:
    """The collector passes over all that there is at the end of this, for good; also where an import has failed.

    Torch has more than a hundred thousand objects, and they live to the end of the process. The collector looks through
    them several times when Python ends, and finds nothing. What is made later is collected as ever, unless something
    older refers to it; so this is for a command that has not run any code of its user yet. The globals of a script that
    is under way would never be collected, and a file among them might lose its end.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
