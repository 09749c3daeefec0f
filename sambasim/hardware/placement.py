"""The simulated hardware of a PEF, and the placement of its replicas: node, RDU and tiles of each."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from sambasim.errors import LaunchError, OptionError, PefError
from sambasim.hardware.budget import whole_tiles
from sambasim.hardware.spec import ClusterSpec, DeviceSpec, arch_of, load_cluster, load_device
from sambasim.units import counted, numbered


@dataclass(frozen=True, slots=True)
class Inventory:
    """A replica has `tiles` tiles of a `device`, or all of it for None; the devices form a `cluster`."""

    device: DeviceSpec
    tiles: int | None
    cluster: ClusterSpec

    @property
    def share(self) -> str:
        return self.device.part(self.tiles)


def inventory_of(
    options: Mapping[str, object], *, arch: str | None = None, tiles: int | None = None, cluster: str | None = None
) -> Inventory:
    """The hardware that a PEF was compiled for; `arch`, `tiles` and `cluster` replace parts of it. The tiles of the PEF
    apply to its own device only. Raises OptionError for unknown names, PefError for impossible tiles."""
    own = load_device(arch_of(options))
    device = load_device(arch) if arch else own
    of_pef = options.get("num_tiles") if device == own else None
    if tiles is None and isinstance(of_pef, int):
        if device.tiles is None or not 1 <= of_pef <= device.tiles:
            most = device.tiles or "an unknown number"
            what = f"the PEF was compiled for {str(of_pef)[:20]} tiles of {device.name}, which has {most}"
            raise PefError(what, where="compile_options.num_tiles", remedy="compile it again")
        tiles = of_pef
    return Inventory(device, tiles, load_cluster(cluster or device.cluster))


@dataclass(frozen=True, slots=True)
class Location:
    """Node, RDU and tiles of one replica, counted from 0; `first_tile` and `tiles` are None for a whole RDU."""

    replica: int
    node: int
    rdu: int
    first_tile: int | None
    tiles: int | None

    def __str__(self) -> str:
        """`node 0 RDU 3 tiles 4-7`."""
        rdu = f"node {self.node} RDU {self.rdu}"
        if self.first_tile is None or self.tiles is None:
            return rdu
        return f"{rdu} {_ranges('tile', range(self.first_tile, self.first_tile + self.tiles))}"


@dataclass(frozen=True)
class Placement:
    """Equal replicas on a cluster, each on its node; those of a node fill one RDU after the other."""

    cluster: ClusterSpec
    tiles: int | None
    per_rdu: int
    node_of: tuple[int, ...]

    @property
    def replicas(self) -> int:
        return len(self.node_of)

    @property
    def per_full_node(self) -> int:
        return self.per_rdu * self.cluster.rdus_per_node

    @cached_property
    def by_node(self) -> Counter[int]:
        """How many replicas each node has."""
        return Counter(self.node_of)

    @property
    def nodes(self) -> int:
        return len(self.by_node)

    @property
    def apart(self) -> bool:
        """Whether each replica has a node of its own."""
        return self.nodes == self.replicas

    @property
    def on_a_node(self) -> int:
        """Replicas on the fullest node."""
        return max(self.by_node.values())

    @property
    def on_an_rdu(self) -> int:
        """Replicas on the fullest RDU."""
        return min(self.on_a_node, self.per_rdu)

    def locations(self) -> list[Location]:
        placed: Counter[int] = Counter()
        locations = []
        for replica, node in enumerate(self.node_of):
            rdu, part = divmod(placed[node], self.per_rdu)
            placed[node] += 1
            first_tile = None if self.tiles is None else part * self.tiles
            locations.append(Location(replica, node, rdu, first_tile, self.tiles))
        return locations

    def in_words(self, noun: str) -> str:
        """`8 replicas on node 0, RDUs 0-7 of cluster sn30-8`, or another `noun` for what has a place."""
        tiles = "" if self.tiles is None else f", {counted(self.tiles, 'tile')} a {noun}"
        replicas = f"{counted(self.replicas, noun)} on {_ranges('node', sorted(self.by_node))}"
        rdus = _ranges("RDU", range(-(-self.on_a_node // self.per_rdu)))
        if self.nodes == 1:
            return f"{replicas}, {rdus} of cluster {self.cluster.name}{tiles}"
        each = "each" if len(set(self.by_node.values())) == 1 else "the fullest"
        return f"{replicas} of cluster {self.cluster.name}, {rdus} of {each}{tiles}"


def place(count: int, device: DeviceSpec, tiles: int | None, cluster: ClusterSpec, noun: str = "replica") -> Placement:
    """`count` replicas, with `tiles` tiles each, None for whole RDUs, fill one node after the other. `noun`: what the
    error calls one. Raises OptionError if the cluster is too small, or the device."""
    per_rdu = _per_rdu(device, tiles)
    on_full_node = per_rdu * cluster.rdus_per_node
    if cluster.nodes is not None and count > cluster.nodes * on_full_node:
        most = cluster.nodes * on_full_node
        holds = f"{cluster.name} holds at most {most}: {_limits(per_rdu, cluster)}, {counted(cluster.nodes, 'node')}"
        remedy = f"ask for {most} or fewer, or for more nodes in the cluster"
        raise OptionError(f"{counted(count, noun)}, and {holds}", remedy=remedy)
    return Placement(cluster, tiles, per_rdu, _nodes(count, on_full_node))


@cache  # a planner places thousands of replicas again and again
def _nodes(count: int, on_full_node: int) -> tuple[int, ...]:
    return tuple(replica // on_full_node for replica in range(count))


def place_replicas(
    inventory: Inventory, node_of: Sequence[int], each: int = 1, *, command: str = "...", or_else: str = ""
) -> Placement:
    """Place replicas on the simulated cluster: those of one MPI node on one simulated node. `node_of`: the node of each
    process, which runs `each` of them; a process without others fills one node after the other. Raises LaunchError if
    they do not fit, OptionError for an emulation."""
    device, tiles, cluster = inventory.device, inventory.tiles, inventory.cluster
    if each > 1 and len(node_of) == 1:
        return place(each, device, tiles, cluster)
    node_of = tuple(node for node in node_of for _ in range(each))
    placement = Placement(cluster, tiles, _per_rdu(device, tiles), node_of)
    if cluster.nodes is not None and placement.nodes > cluster.nodes:
        nodes = f"{placement.nodes} nodes, and {cluster.name} has {counted(cluster.nodes, 'node')}"
        remedy = f"start them on {counted(cluster.nodes, 'host')}, or ask for more nodes in the cluster"
        raise LaunchError(f"the replicas of this job are on {nodes}", remedy=remedy)
    ((node, most),) = placement.by_node.most_common(1)
    fit = placement.per_full_node
    if most > fit:
        started = fit // each
        mpirun = f": mpirun -np {started} {command}" if placement.nodes == 1 else ""
        fewer = f"start {counted(started, 'replica')} a node{', or fewer' if started > 1 else ''}{mpirun}"
        sharing = ((tiles, _per_rdu(device, tiles)) for tiles in range(device.tiles or 0, 0, -1))
        smaller = next(((tiles, by) for tiles, by in sharing if by * cluster.rdus_per_node >= most), None)
        recompile = smaller and f"compile with --num-tiles {smaller[0]}, so that {smaller[1]} share an RDU"
        what = f"{most} {'replicas' if each == 1 else 'ranks'} on node {node}, and a node of {cluster.name} holds"
        remedy = "; or ".join(filter(None, [fewer if started else None, recompile, or_else]))
        raise LaunchError(f"{what} at most {fit}: {_limits(placement.per_rdu, cluster)}", remedy=remedy)
    return placement


def _per_rdu(device: DeviceSpec, tiles: int | None) -> int:
    return 1 if tiles is None else whole_tiles(device, tiles) // tiles


def _limits(per_rdu: int, cluster: ClusterSpec) -> str:
    return f"{'one' if per_rdu == 1 else per_rdu} for each RDU, {counted(cluster.rdus_per_node, 'RDU')} a node"


def _ranges(noun: str, numbers: Sequence[int]) -> str:
    """`RDU 0`, `RDUs 0-7`, `nodes 0 and 2`."""
    consecutive = numbers[-1] - numbers[0] == len(numbers) - 1 > 0
    return f"{noun}s {numbers[0]}-{numbers[-1]}" if consecutive else numbered(noun, numbers)
