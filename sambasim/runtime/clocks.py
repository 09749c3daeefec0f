"""The offsets between the clocks of the ranks, and their accuracy.

Rank 0 exchanges messages with each other rank in turn, after a barrier. A rank that answers at `there` a message sent
at `sent`, whose answer comes at `came`, has a clock that is `there - (sent + came) / 2` ahead, to within half of what
the round trip took; of several, the quickest is taken (Cristian, Distributed Computing 3, 1989). Ranks of one host read
one clock, CLOCK_MONOTONIC, where their measured distance does not say otherwise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter_ns

import numpy as np

from sambasim.runtime.ranks import Communicator

ROUND_TRIPS = 32
_TAG = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Clock:
    """How far a rank's clock is ahead of rank 0's, and the maximum error of that."""

    ahead_ns: int
    accuracy_ns: int


def compare_clocks(communicator: Communicator, now_ns: Callable[[], int] = perf_counter_ns) -> tuple[Clock, ...]:
    """Collective. The clocks of all ranks. `now_ns` reads the clock of this rank."""
    rank = communicator.rank
    boots = communicator.all_gather_object(_boot())
    communicator.barrier()
    clocks = [Clock(0, 0)]
    for other in range(1, communicator.world_size):
        if rank == 0:
            found = _ask(communicator, other, now_ns)
            one_clock = boots[0] is not None and boots[other] == boots[0] and abs(found.ahead_ns) <= found.accuracy_ns
            clocks.append(Clock(0, 0) if one_clock else found)
        elif rank == other:
            _answer(communicator, now_ns)
    return communicator.broadcast_object(tuple(clocks))


def _ask(communicator: Communicator, other: int, now_ns: Callable[[], int]) -> Clock:
    best: Clock | None = None
    there = np.zeros(1, dtype=np.int64)
    for _ in range(ROUND_TRIPS):
        answer = communicator.irecv(there.view(np.uint8), other, _TAG)
        sent_ns = now_ns()
        communicator.wait_all([communicator.isend(np.zeros(1, dtype=np.uint8), other, _TAG)])
        communicator.wait_all([answer])
        came_ns = now_ns()
        if best is None or (came_ns - sent_ns) // 2 < best.accuracy_ns:
            best = Clock(int(there[0]) - (sent_ns + came_ns) // 2, (came_ns - sent_ns) // 2 + 1)
    return best or Clock(0, 0)


def _answer(communicator: Communicator, now_ns: Callable[[], int]) -> None:
    question, now = np.zeros(1, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    for _ in range(ROUND_TRIPS):
        communicator.wait_all([communicator.irecv(question, 0, _TAG)])
        now[0] = now_ns()
        communicator.wait_all([communicator.isend(now.view(np.uint8), 0, _TAG)])


def _boot() -> str | None:
    """The boot id of the kernel: ranks with the same one share a clock. None if it cannot be read."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return None
