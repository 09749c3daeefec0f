"""What a rank receives from the others of its replica, and how long that takes.

A message takes the latency of a link and its bytes over the bandwidth; in a collective, each rank receives the tensors
of all others, as in the runtime. The times follow from published bandwidths alone.
"""

from collections.abc import Iterator, Mapping, Sequence, Set

from sambasim.costs.work import device_bytes_of
from sambasim.hardware.placement import Placement
from sambasim.ir.dataflow import axis_of, groups_of
from sambasim.ir.graph import Graph, Node, Section
from sambasim.ir.mesh import PIPELINE, Mesh
from sambasim.ir.program import Program
from sambasim.ir.stages import copied, ends_of
from sambasim.simulation.sync import Traffic, Wire

_RECEIVES_NOTHING = ("comm.send", "comm.shard", "comm.index")
"""Communication nodes in which a rank receives nothing."""


def traffic_of(
    sections: Sequence[Section],
    graph: Graph,
    program: Program,
    placement: Placement,
    mesh: Mesh,
    rank: int,
    samples: int,
    resident: Set[str],
) -> Mapping[str, Traffic]:
    """The messages of `rank` in one run of `sections`, for a pass of `samples`, by mesh axis. `resident` values are the
    same for each sample."""
    found: dict[str, Traffic] = {}
    node_of = [location.node for location in placement.locations()]
    for node, axis in _receiving(sections, graph):
        group, is_received = mesh.group(rank, axis), node.operator == "comm.recv"
        value = (node.results[0] or "") if is_received else node.reads[0]
        type_ = graph.values[value] if value in graph.values else program.symbols[value].type
        tensors = 1 if is_received else len(group) - 1
        size_bytes = tensors * device_bytes_of(type_)
        if value not in resident:
            size_bytes = size_bytes * samples // program.batch_size
        peers = [group[(group.index(rank) + _shift(node)) % len(group)]] if is_received else group
        one = message(size_bytes, placement, within=all(node_of[peer] == node_of[rank] for peer in peers))
        found[axis] = found.get(axis, Traffic()) + one
    return found


def copies_of(graph: Graph, program: Program, placement: Placement, mesh: Mesh, rank: int) -> Mapping[str, Traffic]:
    """What goes along pp in the update for the tied parameters that `rank` updates, by symbol: the gradient comes, the
    parameter goes back."""
    own = {group.name for group in program.groups}
    node_of = [location.node for location in placement.locations()]
    found = {}
    for node in graph.nodes:
        if (symbol := copied(node)) is not None and own.issuperset(groups_of(node)):
            ends = {node_of[mesh.group(rank, PIPELINE)[position]] for position in ends_of(node)}
            size_bytes = device_bytes_of(program.symbols[symbol].type)
            found[symbol] = message(size_bytes, placement, within=len(ends) == 1)
    return found


def _receiving(sections: Sequence[Section], graph: Graph) -> Iterator[tuple[Node, str]]:
    for section in sections:
        for node in graph.section_nodes(section):
            axis = axis_of(node)
            if axis is not None and not groups_of(node) and node.operator not in _RECEIVES_NOTHING:
                yield node, axis


def _shift(node: Node) -> int:
    shift = dict(node.kwargs).get("shift")
    return shift if isinstance(shift, int) else 0


def message(size_bytes: int, placement: Placement, *, within: bool) -> Traffic:
    cluster = placement.cluster
    if within:
        wire, link, links = Wire.PEER, cluster.peer_link, cluster.peer_links_per_rdu / placement.on_an_rdu
    else:
        wire, link, links = Wire.NETWORK, cluster.network_link, float(cluster.network_links_per_node)
    return Traffic(link.latency_s + size_bytes / (link.bandwidth_bytes_per_s * links), {wire: size_bytes})
