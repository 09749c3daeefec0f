"""What can be learned of the ranks of other nodes, whose boards cannot be seen from here: the watchdogs ask each other.

Nothing is sent as long as all goes well. A watchdog whose rank has waited for too long asks the ranks of all other
nodes. Theirs answer with what they see of their own nodes, whatever their ranks are doing. Of a node from which nobody
answers, every rank is `silent`.
"""

import time
from collections.abc import Sequence
from typing import final

from sambasim.runtime.ranks import Communicator
from sambasim.runtime.watch.board import Line, State
from sambasim.runtime.watch.judgement import Seen
from sambasim.runtime.watch.processes import Process
from sambasim.units import format_seconds

ANSWER_S = 4.0
"""How long a watchdog waits for answers. They come within one look of theirs, where there is anybody to look."""

_POLL_S = 0.02

_QUESTION = "what do you see?"


@final
class ByLetter:
    """Asks and answers by letters of the communicator. `hosts` are the names of the ranks' hosts, in rank order."""

    def __init__(self, communicator: Communicator, hosts: Sequence[str]) -> None:
        self._communicator = communicator
        self._hosts = hosts
        self._answers: dict[int, Seen] = {}
        self._seen: Sequence[Seen] = ()

    def answer(self, seen: Sequence[Seen]) -> None:
        """Tell those who have asked what is `seen` here. Does not wait."""
        self._seen = seen
        for rank, letter in self._communicator.letters():
            if letter == _QUESTION:
                self._communicator.post(tuple(seen), rank)
            elif isinstance(letter, tuple):
                self._answers.update({one.line.rank: one for one in letter if isinstance(one, Seen)})

    def ask(self) -> Sequence[Seen]:
        """What is seen on all other nodes, by rank. Waits for answers, and answers meanwhile."""
        world = self._communicator
        others = [rank for rank, node in enumerate(world.node_of) if node != world.node_index]
        self._answers.clear()
        for rank in others:
            world.post(_QUESTION, rank)
        until = time.monotonic() + ANSWER_S
        while not self._answers.keys() >= set(others) and time.monotonic() < until:
            time.sleep(_POLL_S)
            self.answer(self._seen)
        return [self._answers.get(rank) or self._silent(rank) for rank in others]

    def _silent(self, rank: int) -> Seen:
        doing = f"no answer for {format_seconds(ANSWER_S)}"
        return Seen(Line(rank, self._hosts[rank], 0, 0, 0, State.RUNNING, doing), ANSWER_S, Process.SILENT)
