"""The watchdog: a thread of each rank that observes its node four times a second, and ends a job that is stalled.

On several nodes, a watchdog whose rank has waited too long asks those of the other nodes what they see, by messages
that are sent only then. They answer whatever their ranks are doing. A node that does not answer is `silent`.
"""

import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from sambasim.errors import PeerError
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.supervision.stall import (
    PERIOD_S,
    NodeObserver,
    Observation,
    Process,
    dead_ranks,
    death_error,
    is_stalled,
    stall_error,
)
from sambasim.runtime.supervision.status_file import RankStatus, State, StatusFile
from sambasim.units import format_seconds

ANSWER_S = 4.0
"""How long a watchdog waits for answers from other nodes. They normally take one period."""

_LONG_S = 10.0
"""After this time in one activity, or half of what is allowed, a rank writes which line of Python it is in."""

_POLL_S = 0.02
_QUESTION = "what do you see?"
_PACKAGE = str(Path(__file__).resolve().parents[2])


class OtherNodes:
    """Asks and answers the watchdogs of other nodes. `hosts` are the host names by rank."""

    def __init__(self, communicator: Communicator, hosts: Sequence[str]) -> None:
        self._communicator = communicator
        self._hosts = hosts
        self._answers: dict[int, Observation] = {}

    def answer(self, observed: Sequence[Observation]) -> None:
        """Send `observed` to those who have asked. Does not wait."""
        for rank, message in self._communicator.letters():
            if message == _QUESTION:
                self._communicator.post(tuple(observed), rank)
            elif isinstance(message, tuple):
                self._answers.update({one.status.rank: one for one in message if isinstance(one, Observation)})

    def ask(self, observed: Sequence[Observation]) -> Sequence[Observation]:
        """What is observed on all other nodes, by rank. Waits for answers, and answers with `observed` meanwhile."""
        world = self._communicator
        others = [rank for rank, node in enumerate(world.node_of) if node != world.node_index]
        self._answers.clear()
        for rank in others:
            world.post(_QUESTION, rank)
        until = time.monotonic() + ANSWER_S
        while not self._answers.keys() >= set(others) and time.monotonic() < until:
            time.sleep(_POLL_S)
            self.answer(observed)
        return [self._answers.get(rank) or self._silent(rank) for rank in others]

    def _silent(self, rank: int) -> Observation:
        doing = f"no answer for {format_seconds(ANSWER_S)}"
        return Observation(RankStatus(rank, self._hosts[rank], 0, 0, 0, State.RUNNING, doing), ANSWER_S, Process.SILENT)


class Watchdog:
    """Observes the node of local rank `local_rank` from `start` until `stop`.

    started: by local rank, when its process started, as in `NodeObserver`
    others: None on a single node
    end_job: ends the job with an error; called in the watchdog's thread, and does not return
    """

    def __init__(
        self,
        file: StatusFile,
        started: Sequence[bytes | None],
        local_rank: int,
        timeout_s: float,
        others: OtherNodes | None,
        end_job: Callable[[PeerError], object],
    ) -> None:
        self._observer = NodeObserver(file, started)
        self._activity = file.activity(local_rank)
        self._local_rank = local_rank
        self._timeout_s = timeout_s
        self._others = others
        self._end_job = end_job
        self._main_thread = threading.get_ident()
        self._wrote_place = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sambasim-watchdog", daemon=True)

    def start(self) -> None:
        """Called in the thread that does the rank's work."""
        self._main_thread = threading.get_ident()
        self._thread.start()

    def stop(self, wait_s: float = 0.0) -> None:
        """End the thread. Waits up to `wait_s` for its last observation, which may use MPI."""
        self._stopped.set()
        if wait_s and threading.current_thread() is not self._thread:
            self._thread.join(wait_s)

    def _run(self) -> None:
        while not self._stopped.wait(PERIOD_S):
            error = self._error(self._observer.observe(time.monotonic()))
            if error is not None and not self._stopped.is_set():
                self._end_job(error)

    def _error(self, observed: Sequence[Observation]) -> PeerError | None:
        """Why the job cannot continue, if it cannot."""
        own = observed[self._local_rank]
        self._write_place(own)
        if self._others is not None:
            self._others.answer(observed)
        if dead := dead_ranks(observed):
            return death_error(dead)
        if not is_stalled(own, observed, self._timeout_s):
            return None
        if self._others is not None:
            observed = [*observed, *self._others.ask(observed)]
        return stall_error(observed, self._timeout_s) if is_stalled(own, observed, self._timeout_s) else None

    def _write_place(self, own: Observation) -> None:
        if own.is_running and own.idle_s >= min(self._timeout_s / 2, _LONG_S):
            self._activity.at(user_line(sys._current_frames().get(self._main_thread)))
            self._wrote_place = True
        elif self._wrote_place:
            self._activity.at("")
            self._wrote_place = False


def user_line(frame: FrameType | None, not_user: Sequence[str] | None = None) -> str:
    """`FILE:LINE in FUNCTION` of the innermost frame of user code, from `frame` outwards; empty if there is none.

    not_user: folders whose files are not the user's; by default sambasim, Python and installed packages
    """
    if not_user is None:
        paths = sysconfig.get_paths()
        libraries = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        not_user = [_PACKAGE, *libraries, str(Path(sys.executable).parent)]  # the last has the installed commands
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(("<", *not_user)):
            return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""
