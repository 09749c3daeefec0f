"""The order of additions, as text with every addition in brackets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.collectives.tree import additions
from sambasim.errors import InternalError


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


def test_a_sum_over_nobody_is_refused() -> None:
    with pytest.raises(InternalError, match="a sum over 0 replicas"):
        additions(0)
