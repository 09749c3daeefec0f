"""TCP connections between ranks of different nodes, which move messages while the ranks compute.

MPI moves a long message only inside of its calls, of which a pass makes none. Here a thread for each direction of a
connection waits in the kernel, without Python's lock. The most urgent of the messages that wait is sent first.

Where messages are few and short, the buffers of the kernel hold them, and to wake a thread takes longer than they do:
each rank moves them itself, while it waits.
"""

import os
import secrets
import select
import socket
import threading
from collections.abc import Callable, Collection
from contextlib import suppress

from sambasim.errors import MachineError, PeerError
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.node_memory import ByteArray
from sambasim.runtime.machine.process import INTERFACE_KEY, outside_address
from sambasim.runtime.transports.connection import HEAD, Direct, Places, Sender, Urgency, fill, pause_of, read
from sambasim.units import KIB, MIB

_TIMEOUT_S, _GREETING_S = 30.0, 5.0
_UNSENT_BYTES = 2 * MIB
"""What the kernel keeps of messages beside what is under way: behind it, an urgent message waits. With 256 KiB, threads
that find no free processor in time leave a fast or long connection idle."""
SHORT_BYTES = 256 * KIB
"""The most that a rank receives in a step without threads. With more they are as fast, and the rank computes."""
_TOKEN_BYTES, _RANK_BYTES = 16, 8
_LOOKS = 2_000  # about 2 ms
_OPTIONS = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES),
    # A host that is cut off ends the connection after 300 s, also while nothing is sent.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 300_000),
)


class Links:
    """Connections to `peers`, ranks of `communicator`. `places`: by sender and number, where a message goes;
    `arrived(number)` is called when it is there: by a thread with `changed` held, or in `wait_for`. Collective. Raises
    MachineError on all ranks if hosts cannot connect."""

    def __init__(
        self, communicator: Communicator, peers: Collection[int], places: Places, arrived: Callable[[int], object]
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
        self._senders: dict[int, Sender | Direct] = {}
        self._direct: dict[int, Direct] = {}
        is_short = sum(place.nbytes for place in places.values()) <= SHORT_BYTES
        for peer, connection in self._sockets.items():
            for option in _OPTIONS:
                connection.setsockopt(*option)
            connection.settimeout(0.0 if is_short else None)
            if is_short:
                self._senders[peer] = self._direct[peer] = Direct(connection, peer, places, arrived)
                continue
            self._senders[peer] = sender = Sender(connection)
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
            if condition() and not any(direct.unsent for direct in self._direct.values()):
                return
            if self._ended is not None:
                raise self._ended
            if looks:  # a processor that sleeps takes longer to wake than most messages to come
                looks -= 1
                os.sched_yield()
            else:
                poll = select.poll()
                for direct in self._direct.values():
                    poll.register(direct, select.POLLIN | (select.POLLOUT if direct.unsent else 0))
                poll.poll()

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
        head, pause_s = bytearray(HEAD.size), pause_of(connection)
        try:
            while True:
                read(connection, memoryview(head))
                (number,) = HEAD.unpack(head)
                read(connection, self._places[peer, number].data, pause_s)
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
        fill(connection, said)
    except OSError:
        return None
    return int.from_bytes(said[_TOKEN_BYTES:], "little") if secrets.compare_digest(said[:_TOKEN_BYTES], token) else None
