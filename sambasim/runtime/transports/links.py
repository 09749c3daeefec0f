"""TCP connections between ranks of different nodes, which move messages while the ranks compute.

MPI moves a long message only inside of its calls, of which a pass makes none. Here a thread for each direction of a
connection waits in the kernel, without Python's lock. The most urgent of the messages that wait is sent first.
"""

import heapq
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import count
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
_HEAD = struct.Struct("=q")  # the number of a message
_TOKEN_BYTES, _RANK_BYTES = 16, 8
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
    `arrived(number)` is called by a thread when it is there, with `changed` held. Collective. Raises MachineError on
    all ranks if hosts cannot connect."""

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
        self._senders = {peer: _Sender(connection) for peer, connection in self._sockets.items()}
        for peer, connection in self._sockets.items():
            connection.settimeout(None)
            for option in _OPTIONS:
                connection.setsockopt(*option)
            for work in (self._senders[peer].run, lambda at=(peer, connection): self._receive(*at)):
                self._threads.append(threading.Thread(target=work, daemon=True))
                self._threads[-1].start()

    def send(self, peer: int, number: int, buffer: ByteArray, urgency: Urgency) -> None:
        """Begin to send message `number`. The buffer may not change until `peer` has it, of which it must tell."""
        self._senders[peer].put(number, buffer, urgency)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until what `arrived` changes fulfils the `condition`. Raises PeerError if a connection has ended."""
        with self.changed:
            self.changed.wait_for(lambda: condition() or self._ended is not None)
            if not condition() and self._ended is not None:
                raise self._ended

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
                self._ended = self._ended or PeerError(f"the connection to rank {peer} has ended: {error}", rank=peer)
                self.changed.notify_all()
        finally:
            connection.close()


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
