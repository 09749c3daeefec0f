"""An error that escapes on any rank ends the whole job, soon, and is told once.

A rank that raises and leaves while others wait in a collective would hang the job for ever. So the run happens inside
`ends_the_job`. When an error escapes there, the rank

1. announces it to every other rank, and listens for PATIENCE_S whether they announce one too;
2. tells it, if it is the one to tell: of those that announced, the lowest whose error was not caused by another rank;
3. leaves: quietly if every rank has announced (a check that fails on all of them alike), else by MPI's abort.

Where there is a watch over the job, its watchdog finds ranks that have died or that keep the others waiting, and ends
the job in the same way, from a thread of its own. If a peer has died, that is what is told, whatever came of it here.

Nothing here waits for a rank that does not answer, and a timer ends this process should MPI itself not return.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from sambasim.errors import PeerError
from sambasim.runtime.ranks import Communicator, FailureNotice
from sambasim.runtime.watch.watch import Watch

PATIENCE_S = 1.0
"""How long a failing rank listens for others. Ranks that fail the same check do so within milliseconds."""

DEADLINE_S = 5
"""A failing rank ends after this time, whatever it is doing then."""

LEAVING_S = 30
"""The same, once all ranks leave together: nobody waits for them then, and MPI is slow on a busy machine."""

_POLL_S = 0.005

_FORWARDING_S = 0.3
"""What launchers get to pass on what was told: some drop the output that they have not yet read when a job aborts."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What `tell` gets: the error, and the rank and host that it happened on.

    alike: every rank of the job left with the same words, so that naming one of them would mislead
    doing: what the rank was doing, where that is known and says more than the error does
    """

    error: BaseException
    rank: int
    host_name: str
    alike: bool
    doing: str | None = None

    @property
    def about(self) -> int:
        """The rank whose fault it is: this one, unless the error names another."""
        named = self.error.rank if isinstance(self.error, PeerError) else None
        return self.rank if named is None else named


@contextmanager
def ends_the_job(
    communicator: Communicator,
    *,
    tell: Callable[[Failure], None],
    exit_code: Callable[[BaseException], int],
    watch: Watch | None = None,
) -> Iterator[None]:
    """Whatever escapes the block ends the job within DEADLINE_S. With one rank it just escapes.

    tell: prints a failure; called on one rank of the job
    exit_code: of an error; the job ends with that of the failure told, and never with 0 if a rank was left behind
    watch: once it has begun, it ends the job too

    Raises SystemExit with the exit code if all ranks leave together.
    """
    ending = _Ending(communicator, tell, exit_code, watch or Watch(communicator))
    if watch is not None:
        watch.ends_by(ending.leave)
    try:
        yield
    except BaseException as error:
        if communicator.world_size == 1:
            raise
        ending.leave(error)


def teller(notices: Mapping[int, FailureNotice]) -> int:
    """The rank that tells: the lowest whose error was not caused by another rank; else the lowest."""
    primary = [rank for rank, notice in notices.items() if not notice.secondary]
    return min(primary or notices)


class _Ending:
    """The end of the job, seen from this rank. The first thread that comes to it is the one that leaves."""

    def __init__(
        self,
        communicator: Communicator,
        tell: Callable[[Failure], None],
        exit_code: Callable[[BaseException], int],
        watch: Watch,
    ) -> None:
        self._communicator = communicator
        self._tell = tell
        self._exit_code = exit_code
        self._watch = watch
        self._taken = threading.Lock()

    def leave(self, error: BaseException) -> NoReturn:
        if not self._taken.acquire(blocking=False):
            while True:  # another thread ends this process
                time.sleep(DEADLINE_S)
        _end_within(DEADLINE_S)
        communicator, doing = self._communicator, self._watch.doing
        error = self._watch.failing() or error
        own = FailureNotice(f"{type(error).__name__}: {error}", self._exit_code(error), isinstance(error, PeerError))
        notices = _listen(communicator, own)
        all_leave = len(notices) == communicator.world_size
        alike = all_leave and all(notice.words == own.words for notice in notices.values())
        tells = teller(notices) == communicator.rank
        asked_to_exit = alike and isinstance(error, SystemExit)
        if tells and not asked_to_exit:
            doing = None if alike or own.secondary else doing
            self._tell(Failure(error, communicator.rank, communicator.host_name, alike, doing))
            sys.stderr.flush()
        code = notices[teller(notices)].exit_code
        if tells or all_leave:
            self._watch.over()
        if all_leave and threading.current_thread() is threading.main_thread():
            _end_within(LEAVING_S)
            raise SystemExit(code) from None
        if not tells:
            time.sleep(2 * PATIENCE_S)  # the teller aborts the job, this rank included; if it died, this one does
        else:
            time.sleep(_FORWARDING_S)
        communicator.abort(max(code, 1))


def _end_within(seconds: float) -> None:
    """This process ends after so many seconds, even if no Python runs in it any more. A later call takes the place of
    an earlier one."""
    nowhere = os.open(os.devnull, os.O_WRONLY)  # it would print where each thread is; the descriptor must stay open
    faulthandler.dump_traceback_later(seconds, file=nowhere, exit=True)


def _listen(communicator: Communicator, own: FailureNotice) -> Mapping[int, FailureNotice]:
    """Announce, then gather the announcements of others until all are here or patience ends."""
    communicator.announce_failure(own)
    until = time.monotonic() + PATIENCE_S
    while len(notices := communicator.failures()) < communicator.world_size and time.monotonic() < until:
        time.sleep(_POLL_S)
    return notices
