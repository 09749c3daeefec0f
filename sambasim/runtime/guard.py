"""An error that escapes on any rank ends the whole job, soon, and is told once.

A rank that raises and leaves while others wait in a collective would hang the job for ever. So the run happens inside
`ends_the_job`. When an error escapes there, the rank

1. announces it to every other rank, and listens for PATIENCE_S whether they announce one too;
2. tells it, if it is the one to tell: of those that announced, the lowest whose error was not caused by another rank;
3. leaves: quietly if every rank has announced (a check that fails on all of them alike), else by MPI's abort.

Nothing here waits for a rank that does not answer, and an alarm ends this process should MPI itself not return.
"""

import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from sambasim.errors import PeerError
from sambasim.runtime.ranks import Communicator, FailureNotice

PATIENCE_S = 1.0
"""How long a failing rank listens for others. Ranks that fail the same check do so within milliseconds."""

DEADLINE_S = 5
"""The operating system ends a failing rank after this time, whatever it is doing then."""

LEAVING_S = 30
"""The same, once all ranks leave together: nobody waits for them then, and MPI is slow on a busy machine."""

_POLL_S = 0.005

_FORWARDING_S = 0.3
"""What launchers get to pass on what was told: some drop the output that they have not yet read when a job aborts."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What `tell` gets: the error, and the rank and host that it happened on.

    alike: every rank of the job left with the same words, so that naming one of them would mislead
    """

    error: BaseException
    rank: int
    host_name: str
    alike: bool


@contextmanager
def ends_the_job(
    communicator: Communicator,
    *,
    tell: Callable[[Failure], None],
    exit_code: Callable[[BaseException], int],
) -> Iterator[None]:
    """Whatever escapes the block ends the job within DEADLINE_S. With one rank it just escapes.

    tell: prints a failure; called on one rank of the job
    exit_code: of an error; the job ends with that of the failure told, and never with 0 if a rank was left behind

    Raises SystemExit with the exit code if all ranks leave together.
    """
    try:
        yield
    except BaseException as error:
        if communicator.world_size == 1:
            raise
        _leave(communicator, error, tell, exit_code)


def teller(notices: Mapping[int, FailureNotice]) -> int:
    """The rank that tells: the lowest whose error was not caused by another rank; else the lowest."""
    primary = [rank for rank, notice in notices.items() if not notice.secondary]
    return min(primary or notices)


def _leave(
    communicator: Communicator,
    error: BaseException,
    tell: Callable[[Failure], None],
    exit_code: Callable[[BaseException], int],
) -> NoReturn:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(DEADLINE_S)
    own = FailureNotice(f"{type(error).__name__}: {error}", exit_code(error), isinstance(error, PeerError))
    notices = _listen(communicator, own)
    all_leave = len(notices) == communicator.world_size
    alike = all_leave and all(notice.words == own.words for notice in notices.values())
    tells = teller(notices) == communicator.rank
    asked_to_exit = alike and isinstance(error, SystemExit)
    if tells and not asked_to_exit:
        tell(Failure(error, communicator.rank, communicator.host_name, alike))
        sys.stderr.flush()
    code = notices[teller(notices)].exit_code
    if all_leave:
        signal.alarm(LEAVING_S)
        raise SystemExit(code) from None
    if not tells:
        time.sleep(2 * PATIENCE_S)  # the teller aborts the job, this rank included; if it died instead, this one does
    else:
        time.sleep(_FORWARDING_S)
    communicator.abort(max(code, 1))


def _listen(communicator: Communicator, own: FailureNotice) -> Mapping[int, FailureNotice]:
    """Announce, then gather the announcements of others until all are here or patience ends."""
    communicator.announce_failure(own)
    until = time.monotonic() + PATIENCE_S
    while len(notices := communicator.failures()) < communicator.world_size and time.monotonic() < until:
        time.sleep(_POLL_S)
    return notices
