"""How buffers are cut: any world size, any length."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sambasim.collectives.slices import CUT_ELEMENTS, cut, pieces
from sambasim.ir.types import NORM_BLOCK_ELEMENTS


@given(
    numel=st.integers(0, 10**7),
    world_size=st.integers(1, 17),
    granule=st.sampled_from([CUT_ELEMENTS, NORM_BLOCK_ELEMENTS]),
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
