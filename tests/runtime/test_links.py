"""Connections of device sync: two ranks, which here are threads of one process."""

import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest

from sambasim.errors import MachineError, PeerError
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.node_memory import ByteArray
from sambasim.runtime.transports import links
from sambasim.runtime.transports.links import Links
from sambasim.runtime.watch.watchdog import is_wait

T = TypeVar("T")

SIZE = 8 << 20
"""More than the kernel takes of a message before the other side reads."""


@dataclass
class Table:
    """What two ranks exchange; `visitor` is called with it once both have given something."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=20))
    given: dict[int, Any] = field(default_factory=dict)
    visitor: Callable[[dict[int, Any]], object] = lambda given: None


@dataclass(frozen=True)
class Rank(Communicator):
    table: Table = field(default_factory=Table)

    def broadcast_object(self, value: T | None) -> T:
        found: T = self.all_gather_object(value)[0]
        return found

    def all_gather_object(self, value: Any) -> tuple[Any, ...]:
        self.table.given[self.rank] = value
        self.table.barrier.wait()
        if self.rank == 0:
            self.table.visitor(self.table.given)
        found = self.table.given[0], self.table.given[1]
        self.table.barrier.wait()
        return found


class End:
    """One rank's end: messages go into `memory`, by number."""

    def __init__(self, rank: int, table: Table) -> None:
        self.memory: dict[int, ByteArray] = {number: np.zeros(SIZE, np.uint8) for number in range(5)}
        self.came: list[int] = []
        places = {(1 - rank, number): place for number, place in self.memory.items()}
        self.may_read = threading.Event()
        self.links = Links(Rank(rank, (0, 1), "here", table=table), [1 - rank], places, self._arrived)

    def _arrived(self, number: int) -> None:
        self.came.append(number)
        self.may_read.wait(20)

    def wait_for_all(self) -> None:
        self.links.wait_for(lambda: len(self.came) == len(self.memory))


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "outside_address", lambda host: ("127.0.0.1", "127.0.0.1"))


def connected(table: Table) -> tuple[End, End]:
    with ThreadPoolExecutor(2) as threads:
        first, second = (threads.submit(End, rank, table) for rank in range(2))
        return first.result(30), second.result(30)


@pytest.fixture(params=[0, 5 * SIZE], ids=["by threads", "while it waits"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[End, End]]:
    monkeypatch.setattr(links, "SHORT_BYTES", request.param)
    both = connected(Table())
    yield both
    for end in both:
        end.may_read.set()
        end.links.close()


@pytest.mark.parametrize("ends", [0], indirect=True)
def test_the_most_urgent_of_those_that_wait_goes_first(ends: tuple[End, End]) -> None:
    here, there = ends
    urgencies = (1, 9), (1, 5), (0, 7), (1, 2), (0, 3)
    for number, urgency in enumerate(urgencies):
        here.links.send(1, number, np.full(SIZE, number + 1, np.uint8), urgency)
    there.may_read.set()
    there.wait_for_all()
    assert there.came[2:] == sorted(there.came[2:], key=urgencies.__getitem__)  # two were on their way
    assert all((there.memory[number] == number + 1).all() for number in range(5))


def test_both_send_at_once(ends: tuple[End, End]) -> None:
    for end in ends:
        end.may_read.set()
    for rank, end in enumerate(ends):
        for number in range(5):
            end.links.send(1 - rank, number, np.full(SIZE, 10 * rank + number, np.uint8), (0, number))
    with ThreadPoolExecutor(2) as threads:
        for waiting in [threads.submit(end.wait_for_all) for end in ends]:
            waiting.result(30)
    for rank, end in enumerate(ends):
        assert [int(end.memory[number].max()) for number in end.came] == [10 * (1 - rank) + n for n in end.came]


def test_a_rank_that_waits_hears_of_an_end(ends: tuple[End, End]) -> None:
    here, there = ends
    here.links.close()
    with pytest.raises(PeerError, match=r"^the connection to rank 0 has ended: that rank has closed it$"):
        there.links.wait_for(lambda: False)


def test_the_watchdog_sees_that_a_rank_waits(ends: tuple[End, End]) -> None:
    def wait() -> None:
        with suppress(PeerError):
            ends[1].links.wait_for(lambda: False)

    waiting = threading.Thread(target=wait)
    waiting.start()
    deadline_s = time.monotonic() + 20
    while not is_wait(sys._current_frames().get(waiting.ident or 0)):
        assert time.monotonic() < deadline_s
    ends[0].links.close()
    waiting.join(20)


def _resets(stranger: socket.socket) -> None:
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()


STRANGERS: dict[str, Callable[[socket.socket], object]] = {
    "another token": lambda stranger: stranger.sendall(bytes(24)),
    "too little": lambda stranger: stranger.sendall(bytes(5)),
    "an end": lambda stranger: stranger.shutdown(socket.SHUT_WR),
    "a reset": _resets,
}


@pytest.mark.parametrize("does", STRANGERS)
def test_a_stranger_is_sent_away(does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_GREETING_S", 0.1)
    strangers: list[socket.socket] = []

    def visit(given: dict[int, Any]) -> None:
        if isinstance(given[1], tuple):  # rank 1 listens, and rank 0 has not connected yet
            strangers.append(socket.create_connection(given[1]))
            STRANGERS[does](strangers[0])

    here, there = connected(Table(visitor=visit))
    if strangers[0].fileno() >= 0:
        strangers[0].settimeout(20)
        with suppress(ConnectionResetError):
            assert strangers[0].recv(1) == b""
        strangers[0].close()
    there.may_read.set()
    here.links.send(1, 2, np.ones(SIZE, np.uint8), (0, 0))
    there.links.wait_for(lambda: there.came == [2])
    for end in (here, there):
        end.links.close()


def test_hosts_that_cannot_connect_are_told_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_TIMEOUT_S", 0.2)

    def visit(given: dict[int, Any]) -> None:
        if isinstance(given[1], tuple):
            with socket.create_server(("127.0.0.1", 0)) as closed:
                given[1] = closed.getsockname()

    with pytest.raises(MachineError, match=r"^device sync cannot connect the hosts: Connection refused") as caught:
        connected(Table(visitor=visit))
    assert str(caught.value.remedy).startswith("name the network interface that connects them: GLOO_SOCKET_IFNAME=eth0")
