"""Which replica of a node has begun how many steps with sync, for all of them to read: no message is sent.

A replica that has come to its end looks here whether another waits for it, in a step that it will never take. Without
that the other would wait for ever.
"""

import time

from sambasim.runtime.ranks import Communicator

_PAGE_BYTES = 4096
_MEETS, _ENDED = 8, 16
"""Where a word says that the replica meets the others before its step, and that it has come to its end; the first says
how many steps it has begun."""
_LOOK_S = 0.02


class Board:
    """Of the replicas on this node. Every rank makes one, at the same time."""

    def __init__(self, communicator: Communicator) -> None:
        topology = communicator.topology
        self._window = communicator.allocate_shared(_PAGE_BYTES)
        self._ranks = list(topology.local_ranks)
        self._pages = [self._window.of(index).data.cast("q") for index in range(topology.local_size)]
        self._own = self._pages[topology.local_rank]

    def enter(self, *, meets: bool) -> None:
        """This replica begins a step with sync, and before it `meets` the others to compare."""
        self._own[_MEETS] = meets
        self._window.sync()
        self._own[0] += 1
        self._window.sync()

    def end(self) -> tuple[int, int] | None:
        """This replica has come to its end. Waits until all others have, or meet this one to compare; then None. Or
        until one has begun a step that this one will not take: its rank, and the number of that step."""
        self._own[_ENDED] = 1
        while True:
            self._window.sync()
            for rank, page in zip(self._ranks, self._pages, strict=True):
                if page[0] > self._own[0]:
                    return None if page[_MEETS] else (rank, page[0])
            if all(page[_ENDED] for page in self._pages):
                return None
            time.sleep(_LOOK_S)
