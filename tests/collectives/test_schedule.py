"""Messages of the exchange between nodes: what one rank sends another receives, and all of it is the tree's sum."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.collectives import (
    Link,
    Links,
    Message,
    additions,
    all_gather_messages,
    around,
    blocks,
    inside,
    predicted_s,
    reduce_scatter_messages,
)

layouts = st.lists(st.integers(0, 3), min_size=1, max_size=10).map(
    lambda nodes: [list(dict.fromkeys(nodes)).index(node) for node in nodes]  # numbered by their lowest rank
)
LINKS = Links(Link(1e-6, 1e-9), Link(5e-6, 1e-8), 1e-10)


def summed(ranks: list[int], steps: tuple[tuple[int, int], ...], terms: dict[int, str]) -> dict[int, str]:
    """The operands after `steps`, as text with every addition in brackets."""
    terms = dict(terms)
    for into, source in steps:
        terms[into] = f"({terms[into]}+{terms.pop(source)})"
    return terms


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
    everybody = {rank: str(rank) for rank in range(len(node_of))}
    whole = summed(list(everybody), additions(len(node_of)), everybody)
    for owner, node in enumerate(node_of):
        terms = {rank: str(rank) for rank in everybody if node_of[rank] == node}
        for message in reduce_scatter_messages(node_of, owner).received:
            assert message.owner == message.target == owner
            of_node = {rank: str(rank) for rank in message.ranks}
            terms |= summed(list(of_node), inside(list(message.ranks)), of_node)
        assert summed(list(terms), around(node_of, node), terms) == whole


@given(layouts)
def test_every_node_gets_every_slice_once(node_of: list[int]) -> None:
    for node in set(node_of):
        ranks = [rank for rank, own in enumerate(node_of) if own == node]
        arrived = [message.owner for rank in ranks for message in all_gather_messages(node_of, rank).received]
        assert sorted([*ranks, *arrived]) == list(range(len(node_of)))
        for rank in ranks:  # what it has itself, what it receives, and what it reads of others
            messages = all_gather_messages(node_of, rank)
            assert 1 + len(messages.received) + messages.reads == len(node_of)


@given(layouts)
def test_what_a_rank_does_not_receive_it_reads_on_its_node(node_of: list[int]) -> None:
    """Of parameters all other slices. Of gradients, where a node is summed, each slice of each other rank of it."""
    layout = blocks(node_of)
    for rank in range(len(node_of)):
        gathered = all_gather_messages(node_of, rank)
        assert gathered.reads + len(gathered.received) == len(node_of) - 1
    for node, ranks in enumerate(layout.nodes):
        reads = sum(reduce_scatter_messages(node_of, rank).reads for rank in ranks)
        assert reads == (len(ranks) - 1) * (len(node_of) if layout.summed[node] else len(ranks))


def test_an_aligned_node_sends_one_sum() -> None:
    messages = reduce_scatter_messages([0, 0, 1, 1], 1)
    assert messages.sent == (Message(1, 3, 3, (0, 1)),)
    assert messages.received == (Message(3, 1, 1, (2, 3)),)
    assert messages.reads == 2, "its own slice of its neighbour, and the neighbour's operand of the sum"


def test_a_price_is_what_its_messages_cost() -> None:
    """Two nodes of two ranks, slices of 1,000 bytes: two reads, one message in each direction on a shared link."""
    found_s = predicted_s(reduce_scatter_messages([0, 0, 1, 1], 0), 1000.0, 2, LINKS, adds=True)
    latency_s, transfer_s, addition_s = 1e-6 + 5e-6, 2 * 1000 * 1e-9 + 2 * 1000 * 1e-8, 3 * 1000 * 1e-10
    assert found_s == pytest.approx(latency_s + transfer_s + addition_s)
