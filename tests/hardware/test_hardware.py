"""Devices divided by tiles, and the placement of replicas."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sambasim.errors import LaunchError, OptionError
from sambasim.hardware.budget import budget_of
from sambasim.hardware.placement import Inventory, Placement, inventory_of, place, place_replicas
from sambasim.hardware.spec import load_cluster, load_device

SN30, SN40L = load_device("sn30"), load_device("sn40")
CLUSTER = load_cluster("sn30-8")
TILES = st.none() | st.integers(1, 8)
WHOLE = Inventory(SN30, None, CLUSTER)


def test_half_the_tiles_have_half_of_everything_and_a_device_of_unknown_tiles_is_taken_whole() -> None:
    whole, half = budget_of(SN30), budget_of(SN30, 4)
    assert (whole.units, half.units) == (1280, 640)
    for name in ("chip_bytes", "memory_bytes_per_s", "capacity_bytes"):
        assert getattr(half, name) == getattr(whole, name) / 2
    assert half.placeable_units == 544, "85 % of 640"
    whole = budget_of(SN40L)
    assert whole.memory == "HBM"
    assert whole.capacity_bytes == SN40L.ddr_capacity_bytes + (1 << 36)
    assert whole.behind is not None
    assert whole.behind.fast_bytes == 1 << 36
    assert whole.behind.bytes_per_s < whole.memory_bytes_per_s
    with pytest.raises(OptionError, match="the number of tiles of an SN40L is not published"):
        budget_of(SN40L, 4)


def _check_placement(placement: Placement) -> None:
    taken: set[tuple[int, int, int]] = set()
    for location in placement.locations():
        assert 0 <= location.rdu < placement.cluster.rdus_per_node
        first, tiles = location.first_tile or 0, 8 if location.tiles is None else location.tiles
        assert first + tiles <= 8
        of_replica = {(location.node, location.rdu, tile) for tile in range(first, first + tiles)}
        assert not taken & of_replica, "two replicas on one tile"
        taken |= of_replica
    nodes = [location.node for location in placement.locations()]
    rdus = [(location.node, location.rdu) for location in placement.locations()]
    assert placement.nodes == len(set(nodes))
    assert placement.on_a_node == max(map(nodes.count, nodes))
    assert placement.on_an_rdu == max(map(rdus.count, rdus))


@given(st.integers(1, 70), TILES)
def test_replicas_that_nobody_has_placed_fill_node_after_node(replicas: int, tiles: int | None) -> None:
    placement = place(replicas, SN30, tiles, CLUSTER)
    _check_placement(placement)
    locations = placement.locations()
    assert [location.replica for location in locations] == list(range(replicas))
    assert sorted(locations, key=lambda location: (location.node, location.rdu, location.first_tile or 0)) == locations
    assert placement.nodes == -(-replicas // placement.per_full_node)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), TILES)
def test_replicas_sit_on_the_node_that_is_theirs(node_of: list[int], tiles: int | None) -> None:
    placement = place_replicas(Inventory(SN30, tiles, CLUSTER), node_of)
    _check_placement(placement)
    assert [location.node for location in placement.locations()] == node_of


@pytest.mark.parametrize(
    ("node_of", "tiles", "told"),
    [
        ([0], None, "1 replica on node 0, RDU 0 of cluster sn30-8"),
        ([0, 0, 1, 1], None, "4 replicas on nodes 0-1 of cluster sn30-8, RDUs 0-1 of each"),
        ([0, 0, 2], None, "3 replicas on nodes 0 and 2 of cluster sn30-8, RDUs 0-1 of the fullest"),
        ([0] * 3, 4, "3 replicas on node 0, RDUs 0-1 of cluster sn30-8, 4 tiles a replica"),
    ],
)
def test_words(node_of: list[int], tiles: int | None, told: str) -> None:
    assert place_replicas(Inventory(SN30, tiles, CLUSTER), node_of).in_words("replica") == told


def test_a_node_holds_as_many_replicas_as_it_has_rdus_and_parts_and_what_is_refused_names_every_remedy() -> None:
    for tiles, room in ((None, 8), (8, 8), (5, 8), (4, 16), (1, 64)):
        assert place_replicas(Inventory(SN30, tiles, CLUSTER), [0] * room).per_full_node == room
        with pytest.raises(LaunchError, match=rf"^{room + 1} replicas on node 0, and a node of sn30-8 holds at most "):
            place_replicas(Inventory(SN30, tiles, CLUSTER), [0] * (room + 1))
    with pytest.raises(LaunchError) as refused:
        place_replicas(WHOLE, [0] * 9, command="sambasim run --pef x", or_else="name a larger one")
    assert str(refused.value) == (
        "9 replicas on node 0, and a node of sn30-8 holds at most 8: one for each RDU, 8 RDUs a node\n"
        "  try:   start 8 replicas a node, or fewer: mpirun -np 8 sambasim run --pef x; or compile with --num-tiles 4,"
        " so that 2 share an RDU; or name a larger one"
    )
    with pytest.raises(LaunchError) as refused:
        place_replicas(Inventory(SN40L, None, load_cluster("sn40l-16")), [0] + [1] * 20)
    assert refused.value.what.startswith("20 replicas on node 1, and a node of sn40l-16 holds at most 16")
    assert refused.value.remedy == "start 16 replicas a node, or fewer", "nobody knows how many tiles it has"


def test_a_process_has_room_for_all_ranks_that_it_runs_and_more_nodes_than_there_are_are_refused() -> None:
    assert [one.node for one in place_replicas(WHOLE, [0, 1], 2).locations()] == [0, 0, 1, 1]
    assert [one.node for one in place_replicas(WHOLE, [0], 9).locations()] == [0] * 8 + [1], "an emulation"
    with pytest.raises(LaunchError) as refused:
        place_replicas(WHOLE, [0, 0, 0], 3, command="sambasim run --pef x")
    assert refused.value.what.startswith("9 ranks on node 0, and a node of sn30-8 holds at most 8")
    assert str(refused.value.remedy).startswith("start 2 replicas a node, or fewer: mpirun -np 2 sambasim run --pef x;")
    small = CLUSTER.model_copy(update={"nodes": 1})
    with pytest.raises(LaunchError, match="the replicas of this job are on 2 nodes, and sn30-8 has 1 node"):
        place_replicas(Inventory(SN30, None, small), [0, 1])


def test_a_pef_says_its_device_and_tiles_unless_somebody_else_does() -> None:
    compiled = {"arch": "sn10", "num_tiles": 2}
    of_pef = inventory_of(compiled)
    assert (of_pef.device.name, of_pef.tiles, of_pef.cluster.name) == ("SN10", 2, "sn10-8")
    assert of_pef.share == "2 of 4 tiles of SN10"
    other = inventory_of(compiled, arch="sn40")
    assert (other.device.name, other.tiles, other.cluster.name) == ("SN40L", None, "sn40l-16")
    assert inventory_of(compiled, arch="sn10").tiles == 2, "its own device has the tiles of the PEF"
    assert inventory_of(compiled, tiles=1, cluster="nvlink3-8").tiles == 1
    assert inventory_of({"num_tiles": None}).share == "SN30"
