"""A thread of each rank that looks at the board of its node, some times a second, and ends a job that cannot go on.

It notes when each line last changed, so that who writes needs no clock. A look counts the time since the last one, but
never much of it: a rank that was stopped, or a machine that slept, has not been waiting for others meanwhile.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sambasim.errors import PeerError
from sambasim.runtime.watch.board import Board, Line, State
from sambasim.runtime.watch.judgement import Seen, dead, death, is_stalled, stall
from sambasim.runtime.watch.processes import state_of
from sambasim.runtime.watch.whereabouts import line_of

PERIOD_S = 0.25
"""How often each rank looks."""

_COUNTED_S = 4 * PERIOD_S
"""The most that one look adds to the time for which a line has not changed."""

_LONG_S = 10.0
"""After this time, or half of what is allowed, a rank says which line of Python it is in."""


@dataclass(slots=True)
class _Noted:
    """What a line said at the last look, and for how long it has."""

    line: Line
    idle_s: float = 0.0


class Lookout:
    """What one rank sees of its node, once every rank of it has begun its line.

    began: by local rank, when the process began; None where it cannot be seen
    """

    def __init__(self, board: Board, began: Sequence[bytes | None]) -> None:
        self._board = board
        self._began = began
        self._noted: dict[int, _Noted] = {}
        self._looked_s: float | None = None

    def look(self, now_s: float) -> list[Seen]:
        """What is seen at `now_s`, by local rank."""
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, _COUNTED_S)
        self._looked_s = now_s
        pids = [line.pid for line in self._board.lines()]
        # The process first, the line then: what a process wrote before it went is its last word.
        processes = [state_of(pid, began) for pid, began in zip(pids, self._began, strict=True)]
        return [
            Seen(line, self._idle_s(index, line, passed_s), process)
            for index, (line, process) in enumerate(zip(self._board.lines(), processes, strict=True))
        ]

    def _idle_s(self, index: int, line: Line, passed_s: float) -> float:
        said = replace(line, at="")  # which the watchdog writes, and no work of the rank
        noted = self._noted.get(index)
        if noted is None or noted.line != said:
            self._noted[index] = _Noted(said)
            return 0.0
        noted.idle_s += passed_s
        return noted.idle_s


class OtherNodes(Protocol):
    """What can be learned of the ranks whose board this rank cannot see."""

    def answer(self, seen: Sequence[Seen]) -> None:
        """Tell those who have asked what is `seen` here. Does not wait."""

    def ask(self) -> Sequence[Seen]:
        """What is seen on all other nodes. Waits for answers, and tells of ranks that give none."""


class Watchdog:
    """Looks at `board` from `start` until `stop`.

    end: ends the job with an error; called in the thread of the watchdog, and does not return
    """

    def __init__(
        self,
        board: Board,
        began: Sequence[bytes | None],
        local_rank: int,
        timeout_s: float,
        others: OtherNodes | None,
        end: Callable[[PeerError], None],
    ) -> None:
        self._board = board
        self._began = began
        self._local_rank = local_rank
        self._timeout_s = timeout_s
        self._others = others
        self._end = end
        self._lookout = Lookout(board, began)
        self._writer = board.writer(local_rank)
        self._watched_thread = threading.get_ident()
        self._placed = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sambasim-watchdog", daemon=True)

    def start(self) -> None:
        """Look from now on. The thread that calls this is the one that works."""
        self._watched_thread = threading.get_ident()
        self._thread.start()

    def stop(self) -> None:
        """Look no more. It may be in the midst of a last look: see `rest`."""
        self._over.set()

    def rest(self, timeout_s: float) -> None:
        """After `stop`: wait until the last look, which may use MPI, has ended. Not in its own thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def gone(self) -> PeerError | None:
        """The error for ranks of this node that have died; None if there are none. May be called in any thread."""
        found = dead(Lookout(self._board, self._began).look(0.0))
        return death(found) if found else None

    def _run(self) -> None:
        while not self._over.wait(PERIOD_S):
            error = self._judge(self._lookout.look(time.monotonic()))
            if error is not None and not self._over.is_set():
                self._end(error)

    def _judge(self, seen: Sequence[Seen]) -> PeerError | None:
        own = seen[self._local_rank]
        self._say_where(own)
        if self._others is not None:
            self._others.answer(seen)
        if found := dead(seen):
            return death(found)
        if not is_stalled(own, seen, self._timeout_s):
            return None
        if self._others is not None:
            seen = [*seen, *self._others.ask()]
        return stall(seen, self._timeout_s) if is_stalled(own, seen, self._timeout_s) else None

    def _say_where(self, own: Seen) -> None:
        """Write the line of Python that the working thread is in, once it has been in one thing for long."""
        if own.line.state is State.RUNNING and own.idle_s >= min(self._timeout_s / 2, _LONG_S):
            self._writer.at(line_of(sys._current_frames().get(self._watched_thread)))
            self._placed = True
        elif self._placed:
            self._writer.at("")
            self._placed = False
