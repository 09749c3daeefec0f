"""The mesh: where ranks are on it, and which ranks are a group along an axis."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.errors import InternalError
from sambasim.ir.mesh import Axis, Mesh, mesh_of

sizes = st.dictionaries(st.sampled_from(["dp", "pp", "tp"]), st.integers(1, 4), min_size=1)


def test_the_last_axis_is_the_innermost() -> None:
    mesh = Mesh({"dp": 2, "tp": 3})
    assert mesh.coordinates(4) == {"dp": 1, "tp": 1}
    assert mesh.group(4, "tp") == (3, 4, 5)
    assert mesh.group(4, "dp") == (1, 4)


@given(sizes)
def test_the_groups_along_an_axis_share_no_rank_and_leave_none_out(sizes: dict[str, int]) -> None:
    mesh = Mesh(sizes)
    for axis, size in sizes.items():
        groups = {mesh.group(rank, axis) for rank in range(mesh.world_size)}
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
        for group in groups:
            assert [mesh.coordinates(rank)[axis] for rank in group] == list(range(size))


def test_a_run_chooses_the_sizes_that_were_left_to_it() -> None:
    axes = (Axis("dp", 2, at_run_time=True), Axis("tp", 2))
    assert mesh_of(axes).sizes == {"dp": 2, "tp": 2}
    assert mesh_of(axes, {"dp": 8, "tp": 8}).sizes == {"dp": 8, "tp": 2}


def test_an_axis_that_is_not_there_is_named() -> None:
    with pytest.raises(InternalError, match="no axis pp: dp"):
        Mesh({"dp": 2}).group(0, "pp")
