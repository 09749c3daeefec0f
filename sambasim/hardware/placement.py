"""Which replica has which tiles of which RDU of which node."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from sambasim.errors import LaunchError, OptionError
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

    def __str__(self) -> str:
        """`node 0 RDU 3 tiles 4-7`."""
        of_rdu = f"node {self.node} RDU {self.rdu}"
        if self.first_tile is None or self.tiles is None:
            return of_rdu
        return f"{of_rdu} {_named('tile', range(self.first_tile, self.first_tile + self.tiles))}"


@dataclass(frozen=True, slots=True)
class Placement:
    """Equal replicas on a cluster: they fill one RDU after the other, and one node after the other. `node_of` has the
    node of each replica where that is given, and None where it is not."""

    cluster: ClusterSpec
    replicas: int
    tiles: int | None
    per_rdu: int
    node_of: tuple[int, ...] | None = None

    @property
    def per_full_node(self) -> int:
        """Replicas that a node has room for."""
        return self.per_rdu * self.cluster.rdus_per_node

    @property
    def nodes(self) -> int:
        """Nodes in use."""
        return -(-self.replicas // self.per_full_node) if self.node_of is None else len(set(self.node_of))

    @property
    def on_a_node(self) -> int:
        """Replicas on the fullest node."""
        return min(self.replicas, self.per_full_node) if self.node_of is None else max(Counter(self.node_of).values())

    @property
    def on_an_rdu(self) -> int:
        """Replicas on the fullest RDU."""
        return min(self.on_a_node, self.per_rdu)

    def seats(self) -> list[Seat]:
        """Of all replicas, in order."""
        taken: Counter[int] = Counter()
        seats = []
        for replica in range(self.replicas):
            node = replica // self.per_full_node if self.node_of is None else self.node_of[replica]
            rdu, part = divmod(taken[node], self.per_rdu)
            taken[node] += 1
            seats.append(Seat(replica, node, rdu, None if self.tiles is None else part * self.tiles, self.tiles))
        return seats

    def __str__(self) -> str:
        """`8 replicas on node 0, RDUs 0-7 of cluster sn30-8`."""
        seats = self.seats()
        nodes, rdus = sorted({seat.node for seat in seats}), [seat.rdu for seat in seats]
        tiles = "" if self.tiles is None else f", {_counted(self.tiles, 'tile')} a replica"
        who, where = f"{_counted(self.replicas, 'replica')} on {_named('node', nodes)}", f"cluster {self.cluster.name}"
        places = _named("RDU", range(max(rdus) + 1))
        if len(nodes) == 1:
            return f"{who}, {places} of {where}{tiles}"
        alike = len(set(Counter(seat.node for seat in seats).values())) == 1
        return f"{who} of {where}, {places} of {'each' if alike else 'the fullest'}{tiles}"


def place(replicas: int, device: DeviceSpec, tiles: int | None, cluster: ClusterSpec) -> Placement:
    """`replicas` of `tiles` tiles each, None for whole RDUs. Raises OptionError if the cluster has too few."""
    per_rdu = _per_rdu(device, tiles)
    placement = Placement(cluster, replicas, tiles, per_rdu)
    if cluster.nodes is not None and placement.nodes > cluster.nodes:
        most = cluster.nodes * placement.per_full_node
        raise OptionError(
            f"{replicas} replicas, and {cluster.name} has room for {most}: {_room(placement)},"
            f" {_counted(cluster.nodes, 'node')}",
            remedy=f"ask for {most} or fewer, or for more nodes in the cluster",
        )
    return placement


def place_on_nodes(
    node_of: Sequence[int],
    device: DeviceSpec,
    tiles: int | None,
    cluster: ClusterSpec,
    *,
    command: str = "...",
    or_else: str = "",
) -> Placement:
    """As `place`, for replicas that are on nodes already: `node_of` has that of each.

    command: what mpirun started: the remedy repeats it
    or_else: what else to type where a node has no room for them

    Raises LaunchError if a node has too few RDUs, or the cluster too few nodes.
    """
    placement = Placement(cluster, len(node_of), tiles, _per_rdu(device, tiles), tuple(node_of))
    if cluster.nodes is not None and placement.nodes > cluster.nodes:
        raise LaunchError(
            f"the replicas of this job are on {placement.nodes} nodes, and {cluster.name} has"
            f" {_counted(cluster.nodes, 'node')}",
            remedy=f"start them on {_counted(cluster.nodes, 'host')}, or ask for more nodes in the cluster",
        )
    node, most = Counter(node_of).most_common(1)[0]
    if most > placement.per_full_node:
        room = placement.per_full_node
        mpirun = f": mpirun -np {room} {command}" if placement.nodes == 1 else ""
        fewer = ", or fewer" if room > 1 else ""
        remedies = [f"start {_counted(room, 'replica')} a node{fewer}{mpirun}"]
        smaller = _tiles_for(most, device, cluster)
        if smaller is not None:
            remedies.append(f"compile with --num-tiles {smaller}, so that {_per_rdu(device, smaller)} share an RDU")
        raise LaunchError(
            f"{most} replicas on node {node}, and a node of {cluster.name} has room for {room}: {_room(placement)}",
            remedy="; or ".join([*remedies, *([or_else] if or_else else [])]),
        )
    return placement


def _per_rdu(device: DeviceSpec, tiles: int | None) -> int:
    return 1 if tiles is None or device.tiles is None else max(1, device.tiles // tiles)


def _tiles_for(replicas: int, device: DeviceSpec, cluster: ClusterSpec) -> int | None:
    """The most tiles of which a node has room for so many replicas; None if there is no such number."""
    some = range(device.tiles or 0, 0, -1)
    return next((tiles for tiles in some if _per_rdu(device, tiles) * cluster.rdus_per_node >= replicas), None)


def _room(placement: Placement) -> str:
    what = "one for each RDU" if placement.per_rdu == 1 else f"{placement.per_rdu} for each RDU"
    return f"{what}, {_counted(placement.cluster.rdus_per_node, 'RDU')} a node"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _named(noun: str, numbers: Sequence[int]) -> str:
    """`RDU 0`, `RDUs 0-7`, `nodes 0, 2`."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    in_a_row = numbers[-1] - numbers[0] == len(numbers) - 1
    return f"{noun}s {f'{numbers[0]}-{numbers[-1]}' if in_a_row else ', '.join(map(str, numbers))}"
