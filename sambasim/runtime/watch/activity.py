"""What this rank is doing: told by whoever runs a job, and written on the board where there is one."""

from typing import Protocol, final

from sambasim.runtime.watch.board import State, Writer, prepare


class Activity(Protocol):
    """Hears what this rank does, phase by phase. Steps have a quicker way: `steps.follow`.

    writer: writes on the line of this rank; None where nobody watches
    """

    @property
    def writer(self) -> Writer | None: ...

    def does(self, what: str) -> None:
        """The rank does `what` from now on, for as long as that takes."""

    def takes_long(self, what: str) -> None:
        """The same, for what may take any time, such as writing a large file: the others wait for it."""

    def waits(self, what: str) -> None:
        """The rank waits for other ranks from now on; `what` says for what."""


@final
class Unwatched:
    """A rank that has no others who could wait for it."""

    writer = None

    def does(self, what: str) -> None: ...

    def takes_long(self, what: str) -> None: ...

    def waits(self, what: str) -> None: ...


@final
class OnBoard:
    """Writes on the line of this rank."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer

    def does(self, what: str) -> None:
        self.writer.does(prepare(State.RUNNING, what))

    def takes_long(self, what: str) -> None:
        self.writer.does(prepare(State.BUSY, what))

    def waits(self, what: str) -> None:
        self.writer.does(prepare(State.WAITING, what))


UNWATCHED = Unwatched()
