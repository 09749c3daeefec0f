"""What the replicas of a PEF run on: a device, some of its tiles, and a cluster of such devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sambasim.errors import PefError
from sambasim.hardware.cluster import ClusterSpec, load_cluster
from sambasim.hardware.placement import Placement, place, place_on_nodes
from sambasim.hardware.spec import DeviceSpec, device_of, load_device


@dataclass(frozen=True, slots=True)
class Inventory:
    """A replica has `tiles` tiles of `device`, None for all; `cluster` has as many of them as it says."""

    device: DeviceSpec
    tiles: int | None
    cluster: ClusterSpec

    @property
    def share(self) -> str:
        """What a replica has, in words."""
        if self.tiles is None:
            return self.device.name
        return f"{self.tiles} of {self.device.tiles} tiles of {self.device.name}"


def inventory_of(
    compiled: Mapping[str, object], *, arch: str | None = None, tiles: int | None = None, cluster: str | None = None
) -> Inventory:
    """What a PEF with the options `compiled` asks for, unless it is said: the cluster is that of the device.

    The tiles of the PEF are those of its own device: another `arch` has all of its tiles, unless `tiles` are given.
    Raises OptionError for a device or a cluster that there is not.
    """
    device = load_device(arch) if arch else device_of(compiled)
    of_pef = compiled.get("num_tiles") if arch is None else None
    if tiles is None and isinstance(of_pef, int):
        tiles = _checked_tiles(of_pef, device)
    return Inventory(device, tiles, load_cluster(cluster or device.cluster))


def place_replicas(
    inventory: Inventory, node_of: Sequence[int], emulated: int = 1, *, command: str = "...", or_else: str = ""
) -> Placement:
    """Where replicas are on the simulated machine: replicas of one MPI node on one simulated node.

    node_of: the node of each replica. An emulation has none and fills one simulated node after the other
    command: what mpirun started, for the error
    or_else: another remedy if a node is too small

    Raises LaunchError, or OptionError for an emulation, if the machine is too small; the same on all ranks.
    """
    device, tiles, cluster = inventory.device, inventory.tiles, inventory.cluster
    if emulated > 1:
        return place(emulated, device, tiles, cluster)
    return place_on_nodes(node_of, device, tiles, cluster, command=command, or_else=or_else)


def _checked_tiles(tiles: int, device: DeviceSpec) -> int:
    """The tiles that a PEF names. Raises PefError if its device has not as many, or nobody knows how many."""
    if device.tiles is None or not 1 <= tiles <= device.tiles:
        what = (
            f"the PEF was compiled for {str(tiles)[:20]} tiles of {device.name}, which has {device.tiles or 'unknown'}"
        )
        raise PefError(what, where="compile_options.num_tiles", remedy="compile it again")
    return tiles
