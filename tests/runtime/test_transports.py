"""Flags in a shared window, and the notice about scattered ranks."""

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from sambasim.runtime.machine.communicator import Communicator, SharedWindow
from sambasim.runtime.transports.network import scattered
from sambasim.runtime.transports.shared_flags import Counter, NodeFlags

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OfTwo(Communicator):
    """A rank of two, which are one and the same process."""

    window: SharedWindow = field(kw_only=True)

    def allocate_shared(self, size_bytes: int, touched: object = None) -> SharedWindow:
        return self.window

    def all_gather_object(self, value: T) -> tuple[T, ...]:
        return value, value


def both() -> tuple[NodeFlags, NodeFlags]:
    window = SharedWindow(tuple(np.zeros(8192, np.uint8) for _ in range(2)))
    first, second = (NodeFlags(OfTwo(rank=rank, node_of=(0, 0), host_name="here", window=window)) for rank in range(2))
    return first, second


def test_a_counter_is_reached_when_the_peer_has_published_it() -> None:
    own, peer = both()
    assert own.reached(Counter.PROGRESS, 0)
    assert not own.reached(Counter.PROGRESS, 1)
    peer.publish(Counter.UPDATED, 1)
    assert not own.reached(Counter.PROGRESS, 1)
    peer.publish(Counter.PROGRESS, 2)
    assert own.reached(Counter.PROGRESS, 1)
    own.wait(Counter.PROGRESS, 2)


def test_losses_are_in_rank_order_and_the_largest_request_counts() -> None:
    own, peer = both()
    own.put(0, 0.25, 3)
    peer.put(0, -1.5, 7)
    peer.put(1, 9.0, 0)
    for flags in (own, peer):
        assert flags.numbers(0) == ([0.25, -1.5], 7)
        assert flags.numbers(1) == ([0.0, 9.0], 0)


def test_a_notice_if_the_ranks_of_a_node_are_no_block() -> None:
    assert scattered([0, 0, 1, 1]) == scattered([0, 1, 2]) == []
    (notice,) = scattered([0, 1, 0, 1])
    assert notice.startswith("4 gradients of each slice are sent between 2 nodes; it would be 2 sums")
    (notice,) = scattered([0, 0, 0, 1, 1, 1])
    assert notice.startswith("6 gradients of each slice are sent between 2 nodes")
