"""What lies beside the chip: lifetimes, and addresses that nobody shares while both are alive."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from sambasim.costs.fit import reside
from tests.costs.graphs import ROWS, chain

_WIDTHS = st.lists(st.integers(1, 64), min_size=2, max_size=12)


@given(_WIDTHS, st.data())
def test_no_two_live_tensors_share_an_address(widths: list[int], data: st.DataObject) -> None:
    work = chain(widths)
    count = len(work.stages)
    cuts = sorted(data.draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    residency = reside(work, list(pairwise([0, *cuts, count])))
    for one, other in combinations(residency.boundaries, 2):
        if one.first <= other.last and other.first <= one.last:
            assert one.address + one.size_bytes <= other.address or other.address + other.size_bytes <= one.address
    for number, taken in enumerate(residency.taken_bytes):
        assert taken == sum(one.size_bytes for one in residency.boundaries if one.first <= number <= one.last)
    assert residency.size_bytes >= max(residency.taken_bytes)


def test_a_chain_needs_two_neighbours_at_a_time() -> None:
    residency = reside(chain([32, 32, 32, 32, 32]), [(0, 1), (1, 2), (2, 3), (3, 4)])
    one = ROWS * 32 * 2
    assert [boundary.address for boundary in residency.boundaries] == [0, one, 0, one]
    assert residency.taken_bytes == (one, 2 * one, 2 * one, 2 * one)
    assert residency.size_bytes == 2 * one


def test_what_stays_in_one_section_is_not_beside_the_chip() -> None:
    residency = reside(chain([32, 32, 32]), [(0, 2)])
    assert [boundary.value for boundary in residency.boundaries] == ["y1"], "the graph's own result"


def test_what_has_a_home_elsewhere_is_not_here() -> None:
    assert reside(chain([32, 32, 32]), [(0, 2)], frozenset({"y1"})).boundaries == ()
