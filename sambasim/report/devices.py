"""The output of `sambasim devices`: figures with their sources, and the placement of replicas or ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import RenderableType
from rich.text import Text

from sambasim.hardware.budget import budget_of
from sambasim.hardware.placement import Inventory, Location, Placement
from sambasim.hardware.spec import ClusterSpec, DeviceSpec, LinkSpec, Spec
from sambasim.ir.mesh import Mesh
from sambasim.report.tables import Table, json_line, table, text_of, text_table, title_of
from sambasim.units import format_bytes


def inventory_json(
    devices: Sequence[DeviceSpec],
    clusters: Sequence[ClusterSpec],
    inventory: Inventory,
    placement: Placement,
    mesh: Mesh | None,
) -> str:
    """One line. `nodes` is null for a cluster without a limit; `placement` has the node, RDU and tiles of each
    replica, or of each rank of `mesh`, with its coordinates. Figures are in SI base units."""
    places = [asdict(at) for at in placement.locations()]
    if mesh is not None:
        places = [
            {"rank": at.pop("replica"), "coordinates": mesh.coordinates(rank), **at} for rank, at in enumerate(places)
        ]
    record = {
        "devices": [_record(device) for device in devices],
        "clusters": [_record(cluster) for cluster in clusters],
        "device": inventory.device.name,
        "cluster": inventory.cluster.name,
        "nodes": inventory.cluster.nodes,
        "replicas_per_node" if mesh is None else "ranks_per_node": placement.per_full_node,
        "placement": places,
    }
    return json_line(record)


def inventory_report(
    devices: Sequence[DeviceSpec],
    clusters: Sequence[ClusterSpec],
    inventory: Inventory,
    placement: Placement,
    mesh: Mesh | None,
) -> list[RenderableType]:
    """`mesh` is that of a PEF whose replicas have several ranks; each has a place."""
    budget = budget_of(inventory.device, inventory.tiles)
    figures = [figures_table(f"device {device.name}", device) for device in devices]
    figures += [figures_table(f"cluster {cluster.name}", cluster) for cluster in clusters]
    memory = f"{format_bytes(budget.capacity_bytes)} of {budget.off_chip}"
    share = inventory.share if inventory.tiles is not None else f"all of an {inventory.share}"
    noun = "replica" if mesh is None else "rank"
    head = (
        f"{placement.in_words(noun)}\na {noun} has {share}: {budget.units:,} compute units, {memory};"
        f" {placement.per_full_node} {noun}s fit on a node"
    )
    rows = [
        {
            "replica": at.replica,
            "mesh": mesh and mesh.place(at.replica),
            "node": at.node,
            "rdu": at.rdu,
            "tiles": _tiles(at),
        }
        for at in placement.locations()
    ]
    first = "replica" if mesh is None else "replica:rank, mesh"
    return [*figures, Text(head), table(f"{noun}s", rows, f"{first}, node, rdu:RDU, tiles")]


def figures_table(title: str, spec: Spec) -> Table:
    rows = [(title_of(name), value_text(name, value), source) for name, value, source in figures_of(spec)]
    return text_table(title, ("figure", "value", "source"), (), rows)


def _record(spec: Spec) -> Mapping[str, object]:
    figures = [{"name": name, "value": value, "source": source} for name, value, source in figures_of(spec)]
    return {"name": spec.name, "figures": figures}


def figures_of(spec: Spec) -> list[tuple[str, int | float | str, str]]:
    """Name, value and source of each."""
    figures: list[tuple[str, int | float | str, str]] = []
    for name in type(spec).model_fields:
        value, source = getattr(spec, name), spec.sources.get(name, "a choice")
        if isinstance(value, LinkSpec):
            figures.append((name, value.name, source))
            for part in ("bandwidth_bytes_per_s", "latency_s"):
                figures.append((f"{name}_{part}", getattr(value, part), value.sources[part]))
        elif value is None and name == "nodes":
            figures.append((name, "as many as it takes", "a choice"))
        elif value is None and name == "tiles":
            figures.append((name, "not published", "none"))
        elif value is not None and name not in ("name", "sources"):
            figures.append((name, value, source))
    return figures


def value_text(name: str, value: int | float | str) -> str:
    return text_of(name.removesuffix("_share"), value, ",g")  # a share is a number here, as in its file


def _tiles(at: Location) -> str:
    if at.first_tile is None or at.tiles is None:
        return "all"
    last = at.first_tile + at.tiles - 1
    return str(last) if last == at.first_tile else f"{at.first_tile}-{last}"
