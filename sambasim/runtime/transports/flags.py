"""What the ranks of a node tell each other without a message: counters in shared memory, one page for each rank.

A counter only grows. A rank publishes how far it has come, and others read it when they like: nobody has to stop for
anybody, which a barrier would want. A number published before a counter is there when the counter is seen.
"""

import os
import time
from collections.abc import Sequence
from enum import IntEnum
from time import perf_counter_ns
from typing import NamedTuple

from sambasim.records.trace import Track
from sambasim.runtime.observer import Observed
from sambasim.runtime.ranks import Communicator, SharedWindow

_PAGE_BYTES = 4096
_LINE_WORDS = 8
"""A counter has a cache line to itself: who waits for one does not disturb who writes another."""
_NUMBERS_AT = 64 * _LINE_WORDS
_SLEEP_S = 50e-6
_WAITING = "wait for peers"


class _Patience(NamedTuple):
    """How often a rank looks at a counter in a row, and then how often with a poke before each look; from then on it
    sleeps between them, too."""

    looks: int
    pokes: int


_PATIENT, _CROWDED = _Patience(50, 4000), _Patience(0, 20)
"""Where each rank has a core, and where they share one: there, each look takes time from the rank that is waited for.
To give the core away takes as long as ten looks (estimate, on a virtual machine)."""


class Counter(IntEnum):
    """What a rank publishes."""

    PROGRESS = 0  # sections that it has run, in all steps
    UPDATED = 1  # steps whose gradients it has read, and for which it has updated what it owns of shared parameters


class NodeFlags:
    """The counters of all ranks of this node, and two places, each for a loss and a wish."""

    def __init__(self, communicator: Communicator, owner: Observed) -> None:
        self._owner = owner
        self._window: SharedWindow = communicator.allocate_shared(_PAGE_BYTES * 2)
        self._rank = communicator.topology.local_rank
        size = communicator.topology.local_size
        # Plain Python integers, read in tens of nanoseconds.
        self._words = [self._window.of(index).data.cast("q") for index in range(size)]
        self._floats = [self._window.of(index).data.cast("d") for index in range(size)]
        self._own = self._words[self._rank]
        self._peers = [words for index, words in enumerate(self._words) if index != self._rank]
        self._patience = _CROWDED if size > _cores_of_node(communicator) else _PATIENT
        # Messages to other nodes make progress only inside calls of MPI.
        self._poke = communicator.failures if communicator.topology.node_count > 1 else os.sched_yield

    def publish(self, counter: Counter, value: int) -> None:
        """Everything that this rank wrote before is there for whoever sees `value`."""
        self._window.sync()
        self._own[counter * _LINE_WORDS] = value

    def reached(self, counter: Counter, value: int) -> bool:
        """Whether all peers have published `value` or more."""
        at = counter * _LINE_WORDS
        for words in self._peers:
            if words[at] < value:
                return False
        self._window.sync()
        return True

    def wait(self, counter: Counter, value: int) -> None:
        """Return when all peers have published `value` or more."""
        observer, owner = self._owner.observer, self._owner
        if observer is None:
            self._wait(counter, value)
            return
        observer.span_begins(owner.replica, Track.COLLECTIVES, _WAITING)
        began_ns = perf_counter_ns()
        self._wait(counter, value)
        observer.span_ends(owner.replica, Track.COLLECTIVES, _WAITING, began_ns, {"for": counter.name.lower()})

    def _wait(self, counter: Counter, value: int) -> None:
        at = counter * _LINE_WORDS
        for words in self._peers:
            looks, pokes = self._patience
            while words[at] < value:
                if looks > 0:
                    looks -= 1
                    continue
                self._poke()
                if pokes > 0:
                    pokes -= 1
                else:
                    time.sleep(_SLEEP_S)
        self._window.sync()

    def meet(self, counter: Counter, value: int) -> None:
        """Publish `value`, and wait for all peers: a barrier."""
        self.publish(counter, value)
        self.wait(counter, value)

    def put(self, place: int, loss: float, wish: int) -> None:
        """Leave a loss and a wish at `place`, 0 or 1; the next counter that is published makes them known."""
        at = _NUMBERS_AT + 2 * place
        self._floats[self._rank][at] = loss
        self._floats[self._rank][at + 1] = wish

    def numbers(self, place: int) -> tuple[Sequence[float], int]:
        """What the ranks of the node left at `place`: the losses, by local rank, and the largest wish."""
        at = _NUMBERS_AT + 2 * place
        losses, largest = [], 0.0
        for floats in self._floats:
            losses.append(floats[at])
            if floats[at + 1] > largest:
                largest = floats[at + 1]
        return losses, int(largest)


def _cores_of_node(communicator: Communicator) -> int:
    """Collective. How many cores the ranks of this node may use together: a launcher may bind each to its own."""
    everybody = communicator.all_gather_object(os.sched_getaffinity(0))
    return len(set().union(*(everybody[rank] for rank in communicator.topology.local_ranks)))
