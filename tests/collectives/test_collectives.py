"""The order of additions; messages between nodes: what a rank sends another receives, and all of it is the tree's sum;
and how buffers are cut into slices."""

from collections.abc import Iterable, Mapping
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.collectives import (
    Addition,
    Link,
    Links,
    additions,
    all_gather_messages,
    around,
    blocks,
    inside,
    predicted_s,
    reduce_scatter_messages,
)
from sambasim.ir.types import ALIGNMENT_ELEMENTS, cut, cut_at, pieces


def summed(steps: Iterable[Addition], ranks: Iterable[int], terms: Mapping[int, str] | None = None) -> dict[int, str]:
    """The operands after `steps`, as text with every addition in brackets; at first, that of a rank is its number."""
    after = dict(terms or {rank: str(rank) for rank in ranks})
    for into, source in steps:
        after[into] = f"({after[into]}+{after.pop(source)})"
    return after


def _tree(world_size: int) -> str:
    (term,) = summed(additions(world_size), range(world_size)).values()
    return term


def test_the_tree_is_balanced_in_rank_order_and_skips_absent_leaves() -> None:
    assert [_tree(world_size) for world_size in range(1, 5)] == ["0", "(0+1)", "((0+1)+2)", "((0+1)+(2+3))"]
    assert [_tree(5), _tree(6)] == ["(((0+1)+(2+3))+4)", "(((0+1)+(2+3))+(4+5))"]
    assert _tree(7) == "(((0+1)+(2+3))+((4+5)+6))"


@given(world_size=st.integers(1, 17))
def test_an_aligned_block_of_ranks_is_a_subtree(world_size: int) -> None:
    """What lets a node add its own ranks first without changing a bit."""
    for block in (2, 4, 8):
        for first in range(0, world_size - block + 1, block):
            assert "".join(str(int(c) + first) if c.isdigit() else c for c in _tree(block)) in _tree(world_size)


@given(numel=st.integers(0, 10**7), world_size=st.integers(1, 17))
def test_slices_are_disjoint_cover_everything_and_are_cut_at_multiples(numel: int, world_size: int) -> None:
    slices = cut(numel, world_size)
    assert (len(slices), slices[0][0], slices[-1][1]) == (world_size, 0, numel)
    for (_, stop), (start, _) in pairwise(slices):
        assert stop == start
        assert start % ALIGNMENT_ELEMENTS == 0 or start == numel
    sizes = [stop - start for start, stop in slices]
    assert max(sizes) - min(sizes) <= 2 * ALIGNMENT_ELEMENTS


@given(start=st.integers(0, 1000), length=st.integers(0, 1000), limit=st.integers(1, 300))
def test_pieces_cover_a_slice_in_order(start: int, length: int, limit: int) -> None:
    covered = [element for a, b in pieces(start, start + length, limit) for element in range(a, b)]
    assert covered == list(range(start, start + length))


def test_many_small_groups_are_shared_out_where_none_can_be_cut() -> None:
    by_rank = zip(*cut_at([([0], 64)] * 12, 3), strict=True)
    assert [sum(stop - start for start, stop in slices) for slices in by_rank] == [256, 256, 256]


layouts = st.lists(st.integers(0, 3), min_size=1, max_size=10).map(
    lambda nodes: [list(dict.fromkeys(nodes)).index(node) for node in nodes]  # numbered by their lowest rank
)
LINKS = Links(Link(1e-6, 1e-9), Link(5e-6, 1e-8), 1e-10)


@given(layouts)
def test_each_message_is_sent_and_received_once(node_of: list[int]) -> None:
    for messages_of in (reduce_scatter_messages, all_gather_messages):
        sent = [message for rank in range(len(node_of)) for message in messages_of(node_of, rank).sent]
        received = [message for rank in range(len(node_of)) for message in messages_of(node_of, rank).received]
        assert sorted(sent, key=repr) == sorted(received, key=repr)
        assert len(set(sent)) == len(sent)
        assert all(node_of[message.source] != node_of[message.target] for message in sent)


@given(layouts)
def test_the_owner_of_a_slice_gets_the_sum_of_the_tree(node_of: list[int]) -> None:
    ranks = range(len(node_of))
    whole = summed(additions(len(node_of)), ranks)
    for owner, node in enumerate(node_of):
        terms = summed((), [rank for rank in ranks if node_of[rank] == node])
        for message in reduce_scatter_messages(node_of, owner).received:
            assert message.owner == message.target == owner
            terms |= summed(inside(message.ranks), message.ranks)
        assert summed(around(node_of, node), terms, terms) == whole


@given(layouts)
def test_every_node_gets_every_slice_once_and_a_rank_reads_what_it_does_not_receive(node_of: list[int]) -> None:
    """Of parameters all other slices. Of gradients, where a node is summed, each slice of each other rank of it."""
    layout = blocks(node_of)
    for node, ranks in enumerate(layout.nodes):
        gathered = [all_gather_messages(node_of, rank) for rank in ranks]
        arrived = [message.owner for messages in gathered for message in messages.received]
        assert sorted([*ranks, *arrived]) == list(range(len(node_of)))
        for messages in gathered:  # what it has itself, what it receives, and what it reads of others
            assert 1 + len(messages.received) + messages.reads == len(node_of)
        reads = sum(reduce_scatter_messages(node_of, rank).reads for rank in ranks)
        assert reads == (len(ranks) - 1) * (len(node_of) if layout.summed[node] else len(ranks))


def test_a_price_is_what_its_messages_cost() -> None:
    """Two nodes of two ranks, slices of 1,000 bytes: two reads, one message in each direction on a shared link."""
    found_s = predicted_s(reduce_scatter_messages([0, 0, 1, 1], 0), 1000.0, 2, LINKS, adds=True)
    latency_s, transfer_s, addition_s = 1e-6 + 5e-6, 2 * 1000 * 1e-9 + 2 * 1000 * 1e-8, 3 * 1000 * 1e-10
    assert found_s == pytest.approx(latency_s + transfer_s + addition_s)
