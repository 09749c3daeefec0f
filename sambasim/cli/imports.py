"""Imports that stay out of the way of Python's garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_imports() -> Iterator[None]:
    """What is imported meanwhile lives to the end of the process, and the collector passes over it.

    Torch alone has some 160,000 objects. The collector looks through them several times when Python ends, which takes
    as long as a third of their import, and finds nothing. What is made later is collected as ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
