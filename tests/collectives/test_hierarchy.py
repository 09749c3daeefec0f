"""Sums inside nodes: a block that is a subtree may be added up on its own, and the tree stays the same tree."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from sambasim.collectives.hierarchy import around, blocks, inside, is_subtree
from sambasim.collectives.tree import Addition, additions


def _carried_out(steps: Sequence[Addition], operands: dict[int, str]) -> dict[int, str]:
    """The operands after `steps`, as text that shows who was added to whom."""
    sums = dict(operands)
    for into, source in steps:
        sums[into] = f"({sums[into]}+{sums.pop(source)})"
    return sums


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_an_owner_adds_up_the_same_tree_from_what_arrives(nodes: list[int]) -> None:
    order = list(dict.fromkeys(nodes))
    node_of = [order.index(node) for node in nodes]  # numbered by their lowest rank, as the runtime does
    layout = blocks(node_of)
    whole = _carried_out(additions(len(nodes)), {rank: str(rank) for rank in range(len(nodes))})
    for own in range(len(order)):
        arrived = {rank: str(rank) for rank in layout.nodes[own]}
        for node, ranks in enumerate(layout.nodes):
            if node == own:
                continue
            leaves = {rank: str(rank) for rank in ranks}
            arrived |= _carried_out(inside(ranks), leaves) if layout.summed[node] else leaves
            assert set(layout.travelling(node)) <= set(arrived)
        assert _carried_out(around(node_of, own), arrived) == whole


def test_which_blocks_are_subtrees() -> None:
    assert is_subtree([0, 1], 4)
    assert is_subtree([4, 5, 6], 7), "the world ends inside the block"
    assert not is_subtree([4, 5, 6], 8), "rank 7 is missing"
    assert not is_subtree([1, 2], 4), "it starts in the middle of two"
    assert not is_subtree([0, 2], 4), "dealt round the nodes"
    assert not is_subtree([2, 3, 4, 5], 8)
    assert is_subtree([0, 1, 2], 3)


def test_of_two_aligned_nodes_one_operand_travels() -> None:
    layout = blocks([0, 0, 0, 0, 1, 1, 1, 1])
    assert [layout.travelling(node) for node in (0, 1)] == [(0,), (4,)]
    assert around([0, 0, 0, 0, 1, 1, 1, 1], 0) == ((0, 1), (2, 3), (0, 2), (0, 4))


def test_of_ranks_dealt_round_every_operand_travels() -> None:
    layout = blocks([0, 1, 0, 1])
    assert [layout.travelling(node) for node in (0, 1)] == [(0, 2), (1, 3)]
