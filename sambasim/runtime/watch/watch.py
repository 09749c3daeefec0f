"""The watch over a job of several ranks: a board for each node, and a watchdog in each rank.

moment                                  what becomes of the board's file
the run begins                          made by the first rank of each node, and named on the screen
it ends well, on every rank             taken away, by the last rank of the node that leaves
it ends by an error that is told        taken away: what it says is in what is told
it ends so that no rank could speak     stays: every rank's last line is in it
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from sambasim.errors import PeerError
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.watch import processes
from sambasim.runtime.watch.activity import UNWATCHED, Activity, OnBoard
from sambasim.runtime.watch.board import Board, State, attach, create, name_of, prepare
from sambasim.runtime.watch.other_nodes import ANSWER_S, ByLetter
from sambasim.runtime.watch.watchdog import Watchdog

_LAST_LOOK_S = 1.0
"""How long a rank that leaves waits for its watchdog, which may wait for this very rank to leave."""


class Watch:
    """The watch that one rank keeps. Of a job of one rank, which has nobody to wait for it, there is nothing to see.

    What ends a job (`guard`) asks it who the cause is, and tells it that the job is over.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._board: Board | None = None
        self._dog: Watchdog | None = None
        self._paths: Sequence[Path] = ()
        self._end: Callable[[PeerError], None] | None = None
        self.activity: Activity = UNWATCHED
        """What this rank is doing is told here."""

    def ends_by(self, end: Callable[[PeerError], None]) -> None:
        """`end` ends the job; called in a thread of its own, and does not return. Said before `begin`."""
        self._end = end

    def begin(self, folders: Sequence[Path], title: str, timeout_s: float) -> None:
        """Collective. Watch from now on.

        folders: where the board may be, in order of preference
        title: the first part of its name
        timeout_s: how long a rank may wait for another that does not move

        Raises MachineError if no folder takes a file.
        """
        world = self._communicator
        if world.world_size == 1 or self._end is None:
            return
        first = world.local_ranks[0]
        made = None
        if world.rank == first:
            made = create(folders, name_of(title, world.host_name, os.getpid()), world.local_size)
        paths = world.all_gather_object(None if made is None else made.path)
        self._paths = [path for path in paths if path is not None]
        at = paths[first]
        self._board = made if made is not None or at is None else attach(at, world.local_size)
        if self._board is None:
            return
        writer = self._board.writer(world.local_rank)
        writer.begin(world.rank, world.host_name, os.getpid())
        self.activity = OnBoard(writer)
        began = self._processes()
        others = ByLetter(world, world.all_gather_object(world.host_name)) if world.node_count > 1 else None
        if not world.serves_threads:
            return  # an MPI that only one thread may use: there is a board, and nobody ends what stands still
        self._dog = Watchdog(self._board, began, world.local_rank, timeout_s, others, self._end)
        self._dog.start()

    @property
    def path(self) -> Path | None:
        """The board of this rank's node, if there is one."""
        return None if self._board is None else self._board.path

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that tells what is told once."""
        return self._communicator.rank == 0

    @property
    def doing(self) -> str | None:
        """What this rank was doing last, if it is watched."""
        return None if self._board is None else str(self._board.lines()[self._communicator.local_rank])

    def end(self) -> None:
        """Collective: the run has ended well, on every rank."""
        if self._board is None:
            return
        self.activity.waits("waiting for peers to end")
        self._communicator.barrier()
        if self._dog is not None:
            self._dog.stop()
            self._dog.rest(2 * ANSWER_S)  # MPI is about to end, and must not be asked for letters then
        self.activity.does("done, and about to end")

    def leave(self) -> None:
        """After `end`, and after MPI has ended. The file of the board stays where a rank does not come to this."""
        self._state(State.ENDED)
        if self._board is not None and all(line.state is State.ENDED for line in self._board.lines()):
            with suppress(OSError):
                self._board.path.unlink(missing_ok=True)

    def failing(self) -> PeerError | None:
        """This rank has failed, and is about to end the job. Returns the error for peers that have died before, and so
        may well be the cause."""
        self._state(State.LEAVING)
        if self._dog is None:
            return None
        self._dog.stop()
        return self._dog.gone()

    def over(self) -> None:
        """This rank has told what there was to tell, or has nothing to tell."""
        if self._dog is not None:
            self._dog.stop()
            self._dog.rest(_LAST_LOOK_S)
        self._state(State.ENDED)
        for path in self._paths:  # of other hosts too, where they share a disk
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _state(self, state: State) -> None:
        if self._board is not None:
            own = self._communicator.local_rank
            self._board.writer(own).does(prepare(state, self._board.lines()[own].doing))

    def _processes(self) -> Sequence[bytes | None]:
        """Collective: when each process of the node began; None for one that this rank cannot see."""
        world = self._communicator
        everybody = world.all_gather_object((os.getpid(), processes.number_space()))
        of_node = [everybody[rank] for rank in world.local_ranks]
        own_space = processes.number_space()
        return [processes.began_at(pid) if space == own_space else None for pid, space in of_node]
