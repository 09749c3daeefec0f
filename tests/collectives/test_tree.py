"""The order of additions, as text with every addition in brackets; and how buffers are cut into slices."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.collectives import additions
from sambasim.ir.types import ALIGNMENT_ELEMENTS, cut, cut_at, pieces


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


@given(numel=st.integers(0, 10**7), world_size=st.integers(1, 17))
def test_slices_are_disjoint_cover_everything_and_are_cut_at_multiples(numel: int, world_size: int) -> None:
    slices = cut(numel, world_size)
    assert len(slices) == world_size
    assert slices[0][0] == 0
    assert slices[-1][1] == numel
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
    groups = cut_at([([0], 64)] * 12, 3)
    owned = [sum(stop - start for start, stop in of_rank) for of_rank in zip(*groups, strict=True)]
    assert owned == [256, 256, 256]
