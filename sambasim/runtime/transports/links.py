"""TCP connections between ranks of different nodes, which move messages while the ranks compute.

MPI moves a long message only inside of its calls, of which a pass makes none. Here a thread for each direction of a
connection waits in the kernel, without Python's lock. The most urgent of the messages that wait is sent first.

Where messages are few and short, the buffers of the kernel hold them, and to wake a thread takes longer than they do:
each rank moves them itself, while it waits.
"""

import heapq
import os
import secrets
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import count, islice
from typing import TypeAlias

from sambasim.errors import MachineError, PeerError
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.node_memory import ByteArray
from sambasim.runtime.machine.process import INTERFACE_KEY, outside_address
from sambasim.units import KIB

_TIMEOUT_S, _GREETING_S = 30.0, 5.0
_UNSENT_BYTES = 256 * KIB
"""What the kernel keeps of messages beside what is under way: behind it, an urgent message waits."""
_SENT_BYTES = 46_000
"""The most that the kernel hands to the driver of a network card as one packet. Traffic shapers (tbf with a burst of
64 KiB) cut longer ones into segments of 1,448 bytes, which takes 9 us of processor time for each."""
_READ_BYTES = 16 * KIB
"""A thread that receives is woken for so many bytes, and not for each packet."""
_SHORT_BYTES = 256 * KIB
"""The most that a rank receives in a step without threads. With more they are as fast, and the rank computes."""
_HEAD = struct.Struct("=q")  # the number of a message
_TOKEN_BYTES, _RANK_BYTES = 16, 8
_LOOKS = 2_000  # about 2 ms
_MOST_PARTS = 64  # of messages, in a call; the kernel takes 1,024
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES),
    # A host that is cut off ends the connection after 300 s, also while nothing is sent.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300_000),
)

Urgency: TypeAlias = tuple[int, ...]  # the smallest goes first


class Links:
    """Connections to `peers`, ranks of `communicator`. `places`: by sender and number, where a message goes;
    `arrived(number)` is called when it is there: by a thread with `changed` held, or in `wait_for`. Collective. Raises
    MachineError on all ranks if hosts cannot connect."""

    def __init__(
        self,
        communicator: Communicator,
        peers: Collection[int],
        places: Mapping[tuple[int, int], ByteArray],
        arrived: Callable[[int], object],
    ) -> None:
        self.changed = threading.Condition()
        self._places, self._arrived = places, arrived
        self._ended: PeerError | None = None
        rank, own = communicator.rank, communicator.rank.to_bytes(_RANK_BYTES, "little")
        address, interface = outside_address(communicator.host_name)
        # Whoever can reach the port must also know the token.
        token = communicator.broadcast_object(secrets.token_bytes(_TOKEN_BYTES))
        self._sockets: dict[int, socket.socket] = {}
        with socket.create_server((interface, 0), backlog=max(len(peers), 1)) as listener:
            addresses = communicator.all_gather_object((address, listener.getsockname()[1]))
            with communicator.alike():
                listener.settimeout(_TIMEOUT_S)
                try:
                    for peer in filter(lambda peer: peer > rank, peers):
                        self._sockets[peer] = socket.create_connection(addresses[peer], _TIMEOUT_S)
                        self._sockets[peer].sendall(token + own)
                    while len(self._sockets) < len(peers):
                        connection, _ = listener.accept()
                        if (greeting := _greeting_of(connection, token)) is None:
                            connection.close()
                        else:
                            self._sockets[greeting] = connection
                except OSError as error:
                    where = f"rank {rank} on host {communicator.host_name}, at {address}"
                    what = f"device sync cannot connect the hosts: {error.strerror or error}"
                    remedy = f"name the network interface that connects them: {INTERFACE_KEY}=eth0 mpirun …; "
                    remedy += "let TCP through between the hosts; or leave out --reduce-on-rdu"
                    raise MachineError(what, where=where, remedy=remedy) from error
        self._threads: list[threading.Thread] = []
        self._senders: dict[int, _Sender | _Direct] = {}
        self._direct: dict[int, _Direct] = {}
        is_short = sum(place.nbytes for place in places.values()) <= _SHORT_BYTES
        for peer, connection in self._sockets.items():
            for option in _OPTIONS:
                connection.setsockopt(*option)
            connection.settimeout(0.0 if is_short else None)
            if is_short:
                self._senders[peer] = self._direct[peer] = _Direct(connection, peer, places, arrived)
                continue
            self._senders[peer] = sender = _Sender(connection)
            for work in (sender.run, lambda at=(peer, connection): self._receive(*at)):
                self._threads.append(threading.Thread(target=work, daemon=True))
                self._threads[-1].start()

    def send(self, peer: int, number: int, buffer: ByteArray, urgency: Urgency) -> None:
        """Begin to send message `number`. The buffer may not change until `peer` has it, of which it must tell."""
        self._senders[peer].put(number, buffer, urgency)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until what `arrived` changes fulfils the `condition`. Raises PeerError if a connection has ended."""
        if self._direct:
            self._move_until(condition)
            return
        with self.changed:
            self.changed.wait_for(lambda: condition() or self._ended is not None)
            if not condition() and self._ended is not None:
                raise self._ended

    def _move_until(self, condition: Callable[[], bool]) -> None:
        """And until the kernel has all messages: this rank may not come back before another one needs them."""
        looks = _LOOKS
        while True:
            for peer, direct in self._direct.items():
                try:
                    direct.read()
                    direct.write()
                except OSError as error:
                    self._end(peer, error)
            unsent = [direct for direct in self._direct.values() if direct.unsent]
            if condition() and not unsent:
                return
            if self._ended is not None:
                raise self._ended
            if looks:  # a processor that sleeps takes longer to wake than most messages to come
                looks -= 1
                os.sched_yield()
            else:
                select.select(self._direct.values(), unsent, ())

    def close(self) -> None:
        self._ended = PeerError("this rank has closed its connections")
        for peer, connection in self._sockets.items():
            self._senders[peer].close()
            with suppress(OSError):  # the peer was faster
                connection.shutdown(socket.SHUT_RDWR)
        with self.changed:
            self.changed.notify_all()
        for thread in self._threads:  # Python's end would abort them in C++
            thread.join(_TIMEOUT_S)

    def _receive(self, peer: int, connection: socket.socket) -> None:
        head = bytearray(_HEAD.size)
        try:
            while True:
                _read(connection, memoryview(head))
                (number,) = _HEAD.unpack(head)
                _read(connection, self._places[peer, number].data)
                with self.changed:
                    self._arrived(number)
                    self.changed.notify_all()
        except OSError as error:
            with self.changed:
                self._end(peer, error)
                self.changed.notify_all()
        finally:
            connection.close()

    def _end(self, peer: int, error: OSError) -> None:
        self._ended = self._ended or PeerError(f"the connection to rank {peer} has ended: {error}", rank=peer)


def _greeting_of(connection: socket.socket, token: bytes) -> int | None:
    """The rank of the job that has connected; None for a stranger."""
    said = memoryview(bytearray(_TOKEN_BYTES + _RANK_BYTES))
    connection.settimeout(_GREETING_S)
    try:
        _fill(connection, said)
    except OSError:
        return None
    return int.from_bytes(said[_TOKEN_BYTES:], "little") if secrets.compare_digest(said[:_TOKEN_BYTES], token) else None


def _read(connection: socket.socket, place: memoryview) -> None:
    rest = len(place)
    if rest > 2 * _READ_BYTES:
        # Never more than what must still come: the thread would not be woken.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, _READ_BYTES)
        _fill(connection, place[:-_READ_BYTES])
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        rest = _READ_BYTES
    _fill(connection, place[-rest:])


def _fill(connection: socket.socket, left: memoryview) -> None:
    while left:
        if not (read := connection.recv_into(left, len(left), socket.MSG_WAITALL)):
            raise ConnectionError("that rank has closed it")
        left = left[read:]


class _Direct:
    """A connection without threads. What is sent is with the kernel, or `unsent`."""

    def __init__(
        self,
        connection: socket.socket,
        peer: int,
        places: Mapping[tuple[int, int], ByteArray],
        arrived: Callable[[int], object],
    ) -> None:
        self._connection, self._peer, self._places, self._arrived = connection, peer, places, arrived
        self.fileno = connection.fileno
        self.unsent: deque[memoryview] = deque()
        self._head = memoryview(bytearray(_HEAD.size))
        self._number: int | None = None  # of the message that arrives, once it is known
        self._left = self._head

    def put(self, number: int, buffer: ByteArray, urgency: Urgency) -> None:
        self.unsent += (memoryview(_HEAD.pack(number)), buffer.data)
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
                    (self._number,) = _HEAD.unpack(self._head)
                    self._left = self._places[self._peer, self._number].data
                else:
                    self._arrived(self._number)
                    self._number, self._left = None, self._head
            raise ConnectionError("that rank has closed it")

    def close(self) -> None:
        self._connection.close()


class _Sender:
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
                self._connection.sendall(_HEAD.pack(number), socket.MSG_MORE)
                for at in range(0, buffer.nbytes, _SENT_BYTES):
                    self._connection.sendall(buffer.data[at : at + _SENT_BYTES], socket.MSG_EOR)
