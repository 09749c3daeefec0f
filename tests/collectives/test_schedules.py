"""The schedules, carried out on integers and on structure: any world size, any length."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.collectives.direct import all_gather, reduce_scatter
from sambasim.collectives.slices import CUT_ELEMENTS, NORM_BLOCK_ELEMENTS, cut, pieces
from sambasim.collectives.tree import additions
from sambasim.errors import InternalError

world_sizes = st.integers(1, 17)


@given(
    numel=st.integers(0, 10**7), world_size=world_sizes, granule=st.sampled_from([CUT_ELEMENTS, NORM_BLOCK_ELEMENTS])
)
def test_slices_are_disjoint_cover_everything_and_are_cut_at_granules(
    numel: int, world_size: int, granule: int
) -> None:
    slices = cut(numel, world_size, granule)
    assert len(slices) == world_size
    assert slices[0][0] == 0
    assert slices[-1][1] == numel
    for (_, stop), (start, _) in pairwise(slices):
        assert stop == start
        assert start % granule == 0 or start == numel
    sizes = [stop - start for start, stop in slices]
    assert max(sizes) - min(sizes) <= 2 * granule


@given(start=st.integers(0, 1000), length=st.integers(0, 1000), limit=st.integers(1, 300))
def test_pieces_cover_a_slice_in_order(start: int, length: int, limit: int) -> None:
    covered = [element for a, b in pieces(start, start + length, limit) for element in range(a, b)]
    assert covered == list(range(start, start + length))


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


@given(world_size=world_sizes)
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


@given(world_size=world_sizes, data=st.data())
def test_direct_reduce_scatter_and_all_gather_leave_the_sum_everywhere(world_size: int, data: st.DataObject) -> None:
    row = st.lists(st.integers(-100, 100), min_size=world_size, max_size=world_size)
    operands = data.draw(st.lists(row, min_size=world_size, max_size=world_size))
    received: dict[int, dict[int, int]] = {rank: {rank: operands[rank][rank]} for rank in range(world_size)}
    for transfer in reduce_scatter(world_size):
        assert transfer.target == transfer.slice
        received[transfer.target][transfer.source] = operands[transfer.source][transfer.slice]
    results = [[0] * world_size for _ in range(world_size)]
    for owner in range(world_size):
        terms = dict(received[owner])
        assert sorted(terms) == list(range(world_size))
        for into, source in additions(world_size):
            terms[into] += terms[source]
        results[owner][owner] = terms[0]
    for transfer in all_gather(world_size):
        results[transfer.target][transfer.slice] = results[transfer.source][transfer.slice]
    expected = [sum(column) for column in zip(*operands, strict=True)]
    assert results == [expected] * world_size
