"""What is watched in this process, from when it has found the other ranks until it leaves them."""

import atexit
import os
from collections.abc import Callable

from sambasim.errors import DataParallelError
from sambasim.runtime.ranks import Communicator
from sambasim.samba.checks.board import Board
from sambasim.samba.checks.files import Files
from sambasim.samba.checks.meeting import AS_MANY_BATCHES, Point, meet, together
from sambasim.samba.checks.samplers import Samplers
from sambasim.samba.checks.telling import telling


class Watching:
    """Samplers and files, and what is to be compared last, which each loaded PEF says anew, as its optimizer steps."""

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.samplers = Samplers()
        self.files = Files(communicator.node_of)
        self.compare_last: Callable[[], None] = lambda: _show_nothing(communicator)
        self.settle: Callable[[], None] = lambda: None
        """Tells what a loaded PEF has been waiting with."""
        self.steps = 0
        self.board = Board(communicator)

    def start(self) -> None:
        """Begin to watch."""
        self.samplers.start()
        self.files.start()

    def stop(self) -> None:
        """Watch no more."""
        self.samplers.stop()
        self.files.stop()


def _show_nothing(communicator: Communicator) -> None:
    """The part of a rank that has loaded nothing in a comparison in which others may show what they have."""
    communicator.all_gather_object(None)


_watching: Watching | None = None


def begin(communicator: Communicator) -> None:
    """Watch what several replicas, or one that is checked on demand, do from now on. Every rank calls it once.

    At exit the ranks compare for the last time, unless the job has failed: the others may never come then.
    """
    global _watching
    if communicator.world_size > 1 or telling.on_demand:
        _watching = Watching(communicator)
        _watching.start()
        atexit.register(finish)


def current() -> Watching | None:
    """What is watched now."""
    return _watching


def finish() -> None:
    """Compare what the ranks have done, tell what some of them have found, and watch no more. Collective, the first
    time that it is called.

    A rank that is still taking steps tells that this one has ended, and nothing else is compared. Where it waits for
    this one in a step that is not looked at, it cannot tell: then this one does, and ends the job.
    """
    if _watching is not None:
        telling.ends = True
        _watching.settle()
        files, compare_last = _watching.files, _watching.compare_last
        communicator, end = _watching.communicator, Point(_watching.steps, ended=True)
        board = _watching.board
        abandon()
        waiting = board.end()
        if waiting is not None:
            _end_the_job(communicator.rank, end, *waiting)
        points, shown = meet(communicator, end, (files.take_new(), telling.findings))
        if together(points):
            for rank, (_, findings) in enumerate(shown):
                telling.tell_of(rank, findings)
            files.compare([opened for opened, _ in shown])
            compare_last()


def _end_the_job(own_rank: int, end: Point, rank: int, step: int) -> None:
    from sambasim.samba.door.ending import leave

    words = f"DP09: replica {own_rank} {end.words}, and replica {rank} waits for it in step {step}"
    os._exit(leave(DataParallelError(words, remedy=AS_MANY_BATCHES), None))


def abandon() -> None:
    """Watch no more, and compare nothing."""
    global _watching
    if _watching is not None:
        _watching.stop()
        _watching = None
