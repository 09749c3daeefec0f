"""Which replica has which tiles of which RDU of which node."""

from dataclasses import dataclass

from sambasim.errors import OptionError
from sambasim.hardware.cluster import ClusterSpec
from sambasim.hardware.spec import DeviceSpec


@dataclass(frozen=True, slots=True)
class Seat:
    """Where one replica sits; all count from 0. `first_tile` and `tiles` are None where it has a whole RDU."""

    replica: int
    node: int
    rdu: int
    first_tile: int | None
    tiles: int | None


@dataclass(frozen=True, slots=True)
class Placement:
    """Equal replicas on a cluster: they fill one RDU after the other, and one node after the other."""

    cluster: ClusterSpec
    replicas: int
    tiles: int | None
    per_rdu: int

    @property
    def per_full_node(self) -> int:
        """Replicas that a node has room for."""
        return self.per_rdu * self.cluster.rdus_per_node

    @property
    def nodes(self) -> int:
        """Nodes in use."""
        return -(-self.replicas // self.per_full_node)

    @property
    def on_a_node(self) -> int:
        """Replicas on the fullest node."""
        return min(self.replicas, self.per_full_node)

    @property
    def on_an_rdu(self) -> int:
        """Replicas on the fullest RDU."""
        return min(self.replicas, self.per_rdu)

    def seat(self, replica: int) -> Seat:
        """Of one replica."""
        node, place = divmod(replica, self.per_full_node)
        rdu, part = divmod(place, self.per_rdu)
        return Seat(replica, node, rdu, None if self.tiles is None else part * self.tiles, self.tiles)


def place(replicas: int, device: DeviceSpec, tiles: int | None, cluster: ClusterSpec) -> Placement:
    """`replicas` of `tiles` tiles each, None for whole RDUs. Raises OptionError if the cluster has too few."""
    per_rdu = 1 if tiles is None or device.tiles is None else max(1, device.tiles // tiles)
    placement = Placement(cluster, replicas, tiles, per_rdu)
    if cluster.nodes is not None and placement.nodes > cluster.nodes:
        most = cluster.nodes * placement.per_full_node
        what = "one for each RDU" if per_rdu == 1 else f"{per_rdu} for each RDU"
        nodes = "1 node" if cluster.nodes == 1 else f"{cluster.nodes} nodes"
        raise OptionError(
            f"{replicas} replicas, and {cluster.name} has room for {most}: {what}, {cluster.rdus_per_node} RDUs a node,"
            f" {nodes}",
            remedy=f"ask for {most} or fewer, or for more nodes in the cluster",
        )
    return placement
