"""Where the replicas of a job sit on the simulated machine: one simulated node for each node that MPI finds."""

from collections.abc import Sequence

from sambasim.hardware.placement import Inventory, Placement, place, place_on_nodes
from sambasim.records.metrics import PlacementRecord


def seat(
    inventory: Inventory, node_of: Sequence[int], emulated: int = 1, *, command: str = "...", or_else: str = ""
) -> Placement:
    """The seats of replicas that are on the nodes `node_of`; those of an emulation, which has no nodes, fill one
    simulated node after the other.

    command: what mpirun started
    or_else: what else to type where a node has no room for its replicas

    Raises LaunchError, or OptionError for an emulation, if the machine is too small. That is the same on all ranks.
    """
    device, tiles, cluster = inventory.device, inventory.tiles, inventory.cluster
    if emulated > 1:
        return place(emulated, device, tiles, cluster)
    return place_on_nodes(node_of, device, tiles, cluster, command=command, or_else=or_else)


def placement_record(inventory: Inventory, placement: Placement) -> PlacementRecord:
    """For the summary of a run."""
    seats = placement.locations()
    first_tiles = tuple(seat.first_tile for seat in seats if seat.first_tile is not None)
    return PlacementRecord(
        device=inventory.device.name,
        cluster=placement.cluster.name,
        tiles=placement.tiles,
        node_of=tuple(seat.node for seat in seats),
        rdu_of=tuple(seat.rdu for seat in seats),
        first_tile_of=first_tiles or None,
    )
