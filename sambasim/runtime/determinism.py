"""Make torch repeat itself: at one thread count, one run's bits are those of the next."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def make_repeatable(threads: int) -> None:
    """From now on, for good: `threads` intra-op threads and deterministic kernels."""
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode("warn")  # `use_deterministic_algorithms` would import a compiler, in seconds
    torch._C._set_deterministic_fill_uninitialized_memory(False)


@contextmanager
def repeatable(threads: int) -> Iterator[None]:
    """`threads` intra-op threads and deterministic kernels; torch's own settings are back afterwards.

    Without the latter some scatters add by atomic operations, in whatever order threads arrive. Filling uninitialised
    memory, which torch ties to this setting, is for finding bugs and would cost a pass over every tensor.
    """
    before = torch.get_num_threads()
    mode = torch.get_deterministic_debug_mode()
    fills = torch._C._get_deterministic_fill_uninitialized_memory()
    make_repeatable(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_deterministic_debug_mode(mode)
        torch._C._set_deterministic_fill_uninitialized_memory(fills)
