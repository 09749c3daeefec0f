"""The communicator of one rank: what `tests/mpi/bodies/talk.py` does not show, which runs on one rank too."""

import numpy as np
import pytest

from sambasim.errors import InternalError
from sambasim.runtime.ranks import FailureNotice, Topology, as_bytes, check_gather
from sambasim.runtime.single_rank import SingleRank, single_rank
from sambasim.runtime.supervision.supervisor import reporting_rank


@pytest.fixture
def alone() -> SingleRank:
    return single_rank("here")


def test_topology_seen_from_one_rank_of_five() -> None:
    topology = Topology(rank=3, node_of=(0, 1, 0, 1, 1), host_name="here")
    assert (topology.world_size, topology.node_index, topology.node_count) == (5, 1, 2)
    assert (topology.local_ranks, topology.local_rank, topology.local_size) == ((1, 3, 4), 1, 3)


def test_messages_to_itself_keep_their_order_and_their_tags(alone: SingleRank) -> None:
    first, second, other = (np.zeros(2, dtype=np.uint8) for _ in range(3))
    early = alone.irecv(first, 0, tag=1)
    sent = np.array([1, 2], dtype=np.uint8)
    requests = [early, alone.isend(sent, 0, tag=1), alone.isend(np.array([9], dtype=np.uint8), 0, tag=2)]
    sent[:] = [3, 4]
    requests += [alone.isend(sent, 0, tag=1), alone.irecv(other, 0, tag=2), alone.irecv(second, 0, tag=1)]
    alone.wait_all(requests)
    assert (first.tolist(), second.tolist(), other.tolist()) == ([1, 2], [3, 4], [9, 0])


def test_what_would_wait_for_ever_or_write_elsewhere_is_an_error(alone: SingleRank) -> None:
    three, two = np.zeros(3, dtype=np.uint8), np.zeros(2, dtype=np.uint8)
    with pytest.raises(InternalError, match="waits for a message with tag 5 that it never sent"):
        alone.wait_all([alone.irecv(two, 0, tag=5)])
    alone.isend(three, 0, tag=6)
    with pytest.raises(InternalError, match="a message of 3 bytes for a buffer of 2"):
        alone.wait_all([alone.irecv(two, 0, tag=6)])
    with pytest.raises(InternalError, match=r"the buffer to send has 3 bytes for 1 ranks, the counts say \[2\]"):
        alone.all_to_all(three, [2], two, [2])
    with pytest.raises(InternalError, match="overlap the gathered buffer"):
        check_gather(three[:2], three, [1, 2], rank=1, world_size=2)
    with pytest.raises(InternalError, match="must be contiguous uint8 with one axis"):
        as_bytes(np.zeros(4, dtype=np.uint8)[::2])


def test_the_lowest_rank_whose_failure_is_its_own_reports() -> None:
    own, caused = FailureNotice("own", 2, secondary=False), FailureNotice("caused", 4, secondary=True)
    assert reporting_rank({0: caused, 2: own, 3: own}) == 2
    assert reporting_rank({3: caused, 1: caused}) == 1
