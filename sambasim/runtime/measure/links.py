"""Measure what predictions of a schedule need: messages of two ranks by MPI, and the time to add one byte.

Each link is measured between rank 0 and one other rank, with messages to and fro: half of a small one's round trip is
the latency, and what a large one's takes longer is spent on its bytes.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sambasim.collectives.links import Link
from sambasim.runtime.ranks import Communicator
from sambasim.units import MIB

_TAG = 21
_SMALL_BYTES, _SMALL_ROUNDS = 8, 200
_LARGE_BYTES, _LARGE_ROUNDS = 4 * MIB, 15


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """Links within a node and between nodes, None where no rank is so placed to rank 0; and seconds to add one byte."""

    within: Link | None
    between: Link | None
    addition_s_per_byte: float


def measure_links(communicator: Communicator) -> MeasuredLinks:
    """Collective, for two ranks or more: the same on every rank."""
    nodes = communicator.topology.node_of
    company = next((rank for rank, node in enumerate(nodes) if rank and node == nodes[0]), None)
    stranger = next((rank for rank, node in enumerate(nodes) if node != nodes[0]), None)
    communicator.barrier()
    own = MeasuredLinks(_link(communicator, company), _link(communicator, stranger), _addition_s_per_byte())
    return communicator.broadcast_object(own)


def _link(communicator: Communicator, other: int | None) -> Link | None:
    """Between rank 0 and `other`; only rank 0's answer is one. No other rank takes part."""
    rank = communicator.topology.rank
    if other is None or rank not in (0, other):
        return None
    peer = other if rank == 0 else 0
    small_s = _message_s(communicator, peer, _SMALL_BYTES, _SMALL_ROUNDS)
    large_s = _message_s(communicator, peer, _LARGE_BYTES, _LARGE_ROUNDS)
    return Link(small_s, max(large_s - small_s, 0.0) / (_LARGE_BYTES - _SMALL_BYTES))


def _message_s(communicator: Communicator, peer: int, size_bytes: int, rounds: int) -> float:
    buffer = np.zeros(size_bytes, dtype=np.uint8)

    def send() -> None:
        communicator.wait_all([communicator.isend(buffer, peer, _TAG)])

    def receive() -> None:
        communicator.wait_all([communicator.irecv(buffer, peer, _TAG)])

    begins = communicator.topology.rank == 0

    def round_trip() -> None:
        for act in (send, receive) if begins else (receive, send):
            act()

    return _median_s(round_trip, rounds) / 2


def _addition_s_per_byte() -> float:
    total, operand = torch.zeros(_LARGE_BYTES // 4), torch.ones(_LARGE_BYTES // 4)
    return _median_s(lambda: total.add_(operand), _LARGE_ROUNDS) / _LARGE_BYTES


def _median_s(act: Callable[[], object], rounds: int) -> float:
    """After one round that does not count."""
    act()
    times_s = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        act()
        times_s.append(time.perf_counter() - began_s)
    return statistics.median(times_s)
