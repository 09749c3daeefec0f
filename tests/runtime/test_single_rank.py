"""The communicator of one rank, and the checks on buffers that all leaves share."""

import numpy as np
import pytest

from sambasim.errors import InternalError
from sambasim.runtime.ranks import WINDOW_ALIGNMENT_BYTES, FailureNotice, Topology, check_gather
from sambasim.runtime.single_rank import SingleRank, private_window, single_rank
from sambasim.runtime.supervision.supervisor import reporting_rank


@pytest.fixture
def alone() -> SingleRank:
    return single_rank("here")


def test_topology_seen_from_one_rank_of_five() -> None:
    topology = Topology(rank=3, node_of=(0, 1, 0, 1, 1), host_name="here")
    assert (topology.world_size, topology.node_index, topology.node_count) == (5, 1, 2)
    assert (topology.local_ranks, topology.local_rank, topology.local_size) == ((1, 3, 4), 1, 3)


def test_a_message_that_never_comes_is_an_error_and_not_a_wait(alone: SingleRank) -> None:
    with pytest.raises(InternalError, match="waits for a message with tag 5 that it never sent"):
        alone.wait_all([alone.irecv(np.zeros(1, dtype=np.uint8), 0, tag=5)])


def test_messages_are_asked_for_without_waiting(alone: SingleRank) -> None:
    first, second = (np.zeros(1, dtype=np.uint8) for _ in range(2))
    receives = [alone.irecv(first, 0, tag=1), alone.irecv(second, 0, tag=1)]
    assert alone.test_all([])
    assert not alone.test_all(receives)
    alone.isend(np.array([7], dtype=np.uint8), 0, tag=1)
    assert not alone.test_all(receives), "one message is not two"
    assert not first.any()
    alone.isend(np.array([8], dtype=np.uint8), 0, tag=1)
    assert alone.test_all(receives)
    assert (int(first[0]), int(second[0])) == (7, 8)
    assert alone.test_all(receives), "what is through stays through"
    alone.wait_all(receives)


def test_a_private_window_is_zeros_on_a_page_and_can_be_written() -> None:
    window = private_window(1000)
    assert window.local.tolist() == [0] * 1000
    assert window.local.ctypes.data % WINDOW_ALIGNMENT_BYTES == 0
    window.local[:] = 7
    assert int(window.of(0).sum()) == 7000
    assert len(private_window(0).local) == 0


def test_counts_that_do_not_cover_the_buffer_are_refused(alone: SingleRank) -> None:
    three, two = np.zeros(3, dtype=np.uint8), np.zeros(2, dtype=np.uint8)
    with pytest.raises(InternalError, match=r"the buffer to send has 3 bytes for 1 ranks, the counts say \[2\]"):
        alone.all_to_all(three, [2], two, [2])
    with pytest.raises(InternalError, match="sends itself 3 bytes and receives 2"):
        alone.all_to_all(three, [3], two, [2])
    with pytest.raises(InternalError, match=r"the gathered buffer has 3 bytes for 1 ranks, the counts say \[4\]"):
        alone.all_gather(three, np.zeros(3, dtype=np.uint8), [4])


def test_what_is_gathered_may_be_the_own_part_but_not_another() -> None:
    whole = np.zeros(6, dtype=np.uint8)
    assert check_gather(whole[2:5], whole, [2, 3, 1], rank=1, world_size=3)
    assert not check_gather(np.zeros(3, dtype=np.uint8), whole, [2, 3, 1], rank=1, world_size=3)
    with pytest.raises(InternalError, match="overlap the gathered buffer"):
        check_gather(whole[1:4], whole, [2, 3, 1], rank=1, world_size=3)
    with pytest.raises(InternalError, match="rank 1 gathers 2 bytes, the counts say 3"):
        check_gather(whole[2:4], whole, [2, 3, 1], rank=1, world_size=3)


def test_the_lowest_rank_that_nobody_else_brought_down_tells() -> None:
    own, caused = FailureNotice("own", 2, secondary=False), FailureNotice("caused", 4, secondary=True)
    assert reporting_rank({0: caused, 2: own, 3: own}) == 2
    assert reporting_rank({3: caused, 1: caused}) == 1
