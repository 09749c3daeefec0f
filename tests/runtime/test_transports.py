"""Flags in a shared window, and the notice about scattered ranks."""

import os
import time
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from sambasim.runtime.ranks import Communicator, SharedWindow, Topology
from sambasim.runtime.transports.flags import Counter, NodeFlags
from sambasim.runtime.transports.network import scattered


def both(cores: int) -> tuple[NodeFlags, NodeFlags]:
    """The flags of two ranks on so many cores."""
    window = SharedWindow(tuple(np.zeros(8192, np.uint8) for _ in range(2)))

    def of(rank: int) -> NodeFlags:
        communicator = SimpleNamespace(
            topology=Topology(rank, (0, 0), "here"),
            allocate_shared=lambda size_bytes: window,
            all_gather_object=lambda own: (set(range(cores)),) * 2,
        )
        return NodeFlags(cast(Communicator, communicator), SimpleNamespace(observer=None, replica=rank))

    return of(0), of(1)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a rank does between reads, in order."""
    acts: list[str] = []
    monkeypatch.setattr(os, "sched_yield", lambda: acts.append("yield"))
    monkeypatch.setattr(time, "sleep", lambda seconds: acts.append("sleep"))
    return acts


class Rising:
    """A counter that is 1 after `after` reads."""

    def __init__(self, after: int) -> None:
        self.reads_left = after

    def __getitem__(self, at: int) -> int:
        self.reads_left -= 1
        return int(self.reads_left < 0)


def waits_for(flags: NodeFlags, reads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags, "_peers", [Rising(reads)])
    flags.wait(Counter.PROGRESS, 1)


def test_a_rank_with_a_core_of_its_own_reads_in_a_loop_before_it_yields(
    done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_for(both(cores=2)[0], 51, monkeypatch)
    assert done == []
    waits_for(both(cores=2)[0], 54, monkeypatch)
    assert done == ["yield"] * 3


@pytest.mark.parametrize(("cores", "awake"), [(2, 4051), (1, 21)])
def test_a_rank_that_waits_long_sleeps_between_reads(
    cores: int, awake: int, done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_for(both(cores)[0], awake, monkeypatch)
    assert "sleep" not in done
    waits_for(both(cores)[0], awake + 2, monkeypatch)
    assert done[-4:] == ["yield", "sleep", "yield", "sleep"]


def test_a_counter_is_reached_when_the_peer_has_published_it() -> None:
    own, peer = both(cores=2)
    assert own.reached(Counter.PROGRESS, 0)
    assert not own.reached(Counter.PROGRESS, 1)
    peer.publish(Counter.UPDATED, 1)
    assert not own.reached(Counter.PROGRESS, 1)
    peer.publish(Counter.PROGRESS, 2)
    assert own.reached(Counter.PROGRESS, 1)
    own.wait(Counter.PROGRESS, 2)


def test_losses_are_in_rank_order_and_the_largest_request_counts() -> None:
    own, peer = both(cores=2)
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
