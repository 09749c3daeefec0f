"""One TCP connection to a rank of another node: who moves its messages, and how much at a time. A message is a number
of 8 bytes, which tells where the rest goes."""

import heapq
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count, islice
from typing import TypeAlias

from sambasim.runtime.machine.node_memory import ByteArray
from sambasim.units import KIB

_SENT_BYTES = 46_000
"""The most that the kernel hands to the driver of a network card as one packet. Traffic shapers (tbf with a burst of
64 KiB) cut longer ones into segments of 1,448 bytes, which takes 9 us of processor time for each."""
_READ_BYTES = 16 * KIB
"""A thread that receives is woken for so many bytes, and not for each packet."""
_PAUSE_S = 1e-3
HEAD = struct.Struct("=q")  # the number of a message
_MOST_PARTS = 64  # of messages, in a call; the kernel takes 1,024

Urgency: TypeAlias = tuple[int, ...]  # the smallest goes first
Places: TypeAlias = Mapping[tuple[int, int], ByteArray]  # by sender and number, where a message goes


def pause_of(connection: socket.socket) -> float:
    """The seconds between two looks of a thread that receives; 0 if the kernel is to wake it, where a round trip is
    short. A look acknowledges all that has come, and so for the fifth part fewer packets are sent."""
    (round_trip_us,) = struct.unpack_from("=I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 72), 68)
    return _PAUSE_S if round_trip_us >= 2e6 * _PAUSE_S else 0.0


def read(connection: socket.socket, place: memoryview, pause_s: float = 0.0) -> None:
    if len(place) > 2 * _READ_BYTES:
        long, place = place[:-_READ_BYTES], place[-_READ_BYTES:]
        if pause_s:
            fill(connection, long, pause_s)
        else:  # never woken for more than what must still come: the thread would not be
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _READ_BYTES)
            fill(connection, long)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    fill(connection, place)


def fill(connection: socket.socket, left: memoryview, pause_s: float = 0.0) -> None:
    flags = 0 if pause_s else socket.MSG_WAITALL
    while left:
        if not (read := connection.recv_into(left, len(left), flags)):
            raise ConnectionError("that rank has closed it")
        if left := left[read:]:
            time.sleep(pause_s)


class Direct:
    """A connection without threads. What is sent is with the kernel, or `unsent`."""

    def __init__(self, connection: socket.socket, peer: int, places: Places, arrived: Callable[[int], object]) -> None:
        self._connection, self._peer, self._places, self._arrived = connection, peer, places, arrived
        self.fileno = connection.fileno
        self.unsent: deque[memoryview] = deque()
        self._head = memoryview(bytearray(HEAD.size))
        self._number: int | None = None  # of the message that arrives, once it is known
        self._left = self._head

    def put(self, number: int, buffer: ByteArray, urgency: Urgency) -> None:
        self.unsent += (memoryview(HEAD.pack(number)), buffer.data)
        with suppress(OSError):  # who waits is told
            self.write()

    def write(self) -> None:
        with suppress(BlockingIOError):
            while self.unsent:
                sent = self._connection.sendmsg([*islice(self.unsent, _MOST_PARTS)])
                while sent >= len(self.unsent[0]):
                    sent -= len(self.unsent.popleft())
                    if not self.unsent:
                        return
                self.unsent[0] = self.unsent[0][sent:]

    def read(self) -> None:
        with suppress(BlockingIOError):
            while read := self._connection.recv_into(self._left):
                self._left = self._left[read:]
                if self._left:
                    continue
                if self._number is None:
                    (self._number,) = HEAD.unpack(self._head)
                    self._left = self._places[self._peer, self._number].data
                else:
                    self._arrived(self._number)
                    self._number, self._left = None, self._head
            raise ConnectionError("that rank has closed it")

    def close(self) -> None:
        self._connection.close()


class Sender:
    """Sends what waits, in `run`, the most urgent message first."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._numbers, self._is_closed = connection, count(), False
        self._waiting: list[tuple[Urgency, int, int, ByteArray]] = []
        self._changed = threading.Condition()

    def put(self, number: int, buffer: ByteArray, urgency: Urgency) -> None:
        with self._changed:
            heapq.heappush(self._waiting, (urgency, next(self._numbers), number, buffer))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def run(self) -> None:
        with suppress(OSError):  # the thread that receives tells
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed or bool(self._waiting))
                    if not self._waiting:
                        return
                    _, _, number, buffer = heapq.heappop(self._waiting)
                self._connection.sendall(HEAD.pack(number), socket.MSG_MORE)
                for at in range(0, buffer.nbytes, _SENT_BYTES):
                    self._connection.sendall(buffer.data[at : at + _SENT_BYTES], socket.MSG_EOR)
