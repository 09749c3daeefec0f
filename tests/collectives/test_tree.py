"""The order of additions, as text with every addition in brackets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.collectives.tree import additions, around, blocks, is_subtree


def _tree(world_size: int) -> str:
    """The sum as text, with every addition in brackets."""
    terms = {rank: str(rank) for rank in range(world_size)}
    for into, source in additions(world_size):
        terms[into] = f"({terms[into]}+{terms.pop(source)})"
    assert list(terms) == [0]
    return terms[0]


@pytest.mark.parametrize(
    ("world_size", "expected"),
    [
        (1, "0"),
        (2, "(0+1)"),
        (3, "((0+1)+2)"),
        (4, "((0+1)+(2+3))"),
        (5, "(((0+1)+(2+3))+4)"),
        (6, "(((0+1)+(2+3))+(4+5))"),
        (7, "(((0+1)+(2+3))+((4+5)+6))"),
    ],
)
def test_the_tree_is_balanced_in_rank_order_and_skips_absent_leaves(world_size: int, expected: str) -> None:
    assert _tree(world_size) == expected


@given(world_size=st.integers(1, 17))
def test_an_aligned_block_of_ranks_is_a_subtree(world_size: int) -> None:
    """What lets a node add its own ranks first without changing a bit."""
    whole = _tree(world_size)
    for block in (2, 4, 8):
        for first in range(0, world_size - block + 1, block):
            inner = _tree(block)
            shifted = "".join(str(int(c) + first) if c.isdigit() else c for c in inner)
            assert shifted in whole


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
