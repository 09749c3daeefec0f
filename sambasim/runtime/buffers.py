"""Byte buffers that travel between ranks, and the checks on them.

MPI takes a wrong count silently, as a truncated message or as bytes of a neighbour: every count is checked here first.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sambasim.errors import InternalError

ByteArray: TypeAlias = NDArray[np.uint8]
Buffer: TypeAlias = ByteArray | memoryview
"""Contiguous bytes with one axis. What is received into must be writable."""


def as_bytes(buffer: Buffer) -> ByteArray:
    """The same memory as a numpy array. Raises InternalError if it is not contiguous uint8 with one axis."""
    array = np.asarray(buffer)
    if array.dtype != np.uint8 or array.ndim != 1 or not array.flags.c_contiguous:
        raise InternalError(f"a buffer must be contiguous uint8 with one axis, got {array.dtype} {array.shape}")
    return array


def check_counts(buffer: ByteArray, counts: Sequence[int], world_size: int, what: str) -> None:
    """Raise InternalError unless there is one count a rank and together they cover the buffer."""
    if len(counts) != world_size or sum(counts) != len(buffer) or min(counts) < 0:
        raise InternalError(f"{what} has {len(buffer)} bytes for {world_size} ranks, the counts say {list(counts)}")


def check_gather(send: ByteArray, receive: ByteArray, counts: Sequence[int], rank: int, world_size: int) -> bool:
    """Whether `send` already is this rank's part of `receive`. Raises InternalError as `all_gather` says."""
    check_counts(receive, counts, world_size, "the gathered buffer")
    own = receive[sum(counts[:rank]) :][: counts[rank]]
    if len(send) != len(own):
        raise InternalError(f"rank {rank} gathers {len(send)} bytes, the counts say {counts[rank]}")
    in_place = len(own) > 0 and send.ctypes.data == own.ctypes.data
    if not in_place and np.may_share_memory(send, receive):
        raise InternalError("the bytes to gather overlap the gathered buffer, but are not this rank's part of it")
    return in_place
