"""Counters in shared memory, by which the ranks of a node synchronize without messages.

A counter only grows. Data written before a counter is published is visible to who reads it.
"""

import os
import time
from collections.abc import Sequence
from functools import partial

from sambasim.ir.types import align
from sambasim.records.trace import Track
from sambasim.runtime.machine.communicator import NOTHING, Communicator
from sambasim.runtime.machine.launcher import cores_of_this_process
from sambasim.runtime.watch.observer import span

_PAGE_BYTES = 4096
_LINE_WORDS = 8  # each counter has its own cache line, so that reading one does not slow down writing another
_NUMBERS_AT = 64 * _LINE_WORDS
_SLEEP_S = 50e-6
_WAITING = "wait for peers"

_PATIENT, _CROWDED = (50, 4000), (0, 20)
"""How often a waiting rank reads a counter in a busy loop, and then with a poke before each read, before it also
sleeps. If ranks share cores, a busy loop takes time from the rank that is waited for (estimate)."""


class Counter:
    """By counter, its word in the page of a rank: plain integers, because an IntEnum takes 0.2 µs for each access."""

    PROGRESS = 0  # sections that it has run, over all steps
    UPDATED = _LINE_WORDS  # steps whose gradients it has read and whose parameters it has updated


_FOR = {Counter.PROGRESS: {"for": "progress"}, Counter.UPDATED: {"for": "updated"}}


class NodeFlags:
    """The counters of the ranks of `communicator` on this node, and two slots, each for a request and a loss, with what
    is logged beside it: of `numbers` in all."""

    def __init__(self, communicator: Communicator, numbers: int = 1) -> None:
        parts, self._sync = communicator.allocate_shared(_PAGE_BYTES + align(16 * (1 + numbers), _PAGE_BYTES))
        requests = (_NUMBERS_AT, _NUMBERS_AT + 1 + numbers)
        self._slots = [(request, range(request + 1, request + 1 + numbers)) for request in requests]
        rank = communicator.local_rank
        # Plain Python integers, read in tens of nanoseconds.
        words = [part.data.cast("q") for part in parts]
        self._floats = [part.data.cast("d") for part in parts]
        self._own, self._own_floats = words[rank], self._floats[rank]
        self._peers = words[:rank] + words[rank + 1 :]
        job = communicator.job
        cores_of = communicator.all_gather_object(cores_of_this_process())
        cores = frozenset().union(*(cores_of[rank] for rank in communicator.local_ranks))
        self._patience = _CROWDED if job.local_size > len(cores) else _PATIENT
        # MPI messages to other ranks progress only inside MPI calls.
        has_others = job.node_count > 1 or job.world_size > communicator.world_size
        self._poke = partial(job.posted, NOTHING) if has_others else os.sched_yield

    def publish(self, counter: int, value: int) -> None:
        """Set a counter. All earlier writes of this rank are visible to ranks that read `value`."""
        self._sync()
        self._own[counter] = value

    def reached(self, counter: int, value: int) -> bool:
        """Whether all other ranks of the node have published `value` or more."""
        for words in self._peers:
            if words[counter] < value:
                return False
        self._sync()
        return True

    # Only a trace shows waits that have ended before they began.
    @span(Track.COLLECTIVES, _WAITING, lambda self, counter, value: _FOR[counter], detailed=True)
    def wait(self, counter: int, value: int) -> None:
        """Wait until all other ranks of the node have published `value` or more."""
        for words in self._peers:
            if words[counter] < value:
                self._wait_for(counter, value)
                break
        self._sync()

    @span(Track.COLLECTIVES, _WAITING, detailed=False)
    def _wait_for(self, counter: int, value: int) -> None:
        for words in self._peers:
            reads, pokes = self._patience
            while words[counter] < value:
                if reads > 0:
                    reads -= 1
                    continue
                self._poke()
                if pokes > 0:
                    pokes -= 1
                else:
                    time.sleep(_SLEEP_S)

    def meet(self, counter: int, value: int) -> None:
        self.publish(counter, value)
        self.wait(counter, value)

    def put(self, slot: int, losses: Sequence[float], request: int) -> None:
        """Store the loss and a request in `slot`, 0 or 1; the next published counter makes them visible."""
        at, own = self._slots[slot][0], self._own_floats
        own[at] = request
        for loss in losses:
            at += 1
            own[at] = loss

    def numbers(self, slot: int) -> tuple[Sequence[float], int]:
        """The contents of `slot` of all ranks of the node: the losses by local rank, and the largest request."""
        losses: list[float] = []
        largest, (at, places) = 0.0, self._slots[slot]
        for floats in self._floats:
            for place in places:
                losses.append(floats[place])
            if (request := floats[at]) > largest:
                largest = request
        return losses, int(largest)
