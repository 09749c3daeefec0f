"""The output of `sambasim devices`: devices and clusters, a source beside each figure, and the placement of
replicas."""

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict
from rich.console import RenderableType
from rich.text import Text

from sambasim.hardware.budget import Budget
from sambasim.hardware.placement import Inventory, Location, Placement
from sambasim.hardware.spec import ClusterSpec, DeviceSpec, LinkSpec, Spec
from sambasim.report.output import add_row, plain_table
from sambasim.units import format_bytes, format_count, format_seconds


class FigureRecord(BaseModel):
    """A figure in SI base units, and its source."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    value: int | float | str
    source: str


class SpecRecord(BaseModel):
    """A device, a cluster or a link."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    figures: tuple[FigureRecord, ...]


class LocationRecord(BaseModel):
    """The location of one replica; `first_tile` and `tiles` are None for a whole RDU."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    replica: int
    node: int
    rdu: int
    first_tile: int | None
    tiles: int | None


class InventoryRecord(BaseModel):
    """What `sambasim devices --json` prints. `nodes` is None for a cluster without a limit; `room_of_a_node` is the
    number of replicas that fit on one node, and `seats` are the locations of the replicas."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    devices: tuple[SpecRecord, ...]
    clusters: tuple[SpecRecord, ...]
    device: str
    cluster: str
    nodes: int | None
    room_of_a_node: int
    seats: tuple[LocationRecord, ...]


def inventory_json(
    devices: Sequence[DeviceSpec], clusters: Sequence[ClusterSpec], inventory: Inventory, placement: Placement
) -> str:
    """One line."""
    return InventoryRecord(
        devices=tuple(map(_record, devices)),
        clusters=tuple(map(_record, clusters)),
        device=inventory.device.name,
        cluster=inventory.cluster.name,
        nodes=inventory.cluster.nodes,
        room_of_a_node=placement.per_full_node,
        seats=tuple(
            LocationRecord(replica=at.replica, node=at.node, rdu=at.rdu, first_tile=at.first_tile, tiles=at.tiles)
            for at in placement.locations()
        ),
    ).model_dump_json()


def inventory_report(
    devices: Sequence[DeviceSpec],
    clusters: Sequence[ClusterSpec],
    inventory: Inventory,
    budget: Budget,
    placement: Placement,
) -> list[RenderableType]:
    """A table for each device and each cluster, and one of the locations of the replicas."""
    parts: list[RenderableType] = [_figures("device", device) for device in devices]
    parts += [_figures("cluster", cluster) for cluster in clusters]
    memory = f"{format_bytes(budget.capacity_bytes)} of {'HBM and DDR' if budget.behind else budget.memory}"
    share = inventory.share if inventory.tiles is not None else f"all of an {inventory.share}"
    room = placement.per_full_node
    head = f"{placement}\na replica has {share}: {budget.units:,} compute units, {memory}; a node has room for {room}"
    locations = plain_table("replicas", ["replica", "node", "RDU", "tiles"], [])
    for at in placement.locations():
        add_row(locations, str(at.replica), str(at.node), str(at.rdu), _tiles(at))
    return [*parts, Text(head), locations]


def _figures(what: str, spec: Spec) -> RenderableType:
    table = plain_table(f"{what} {spec.name}", ["figure", "value", "source"], [])
    for figure in _record(spec).figures:
        add_row(table, _title(figure.name), _value(figure.name, figure.value), figure.source)
    return table


def _record(spec: Spec) -> SpecRecord:
    """The figures of a device or a cluster; those of its links are included."""
    figures: list[FigureRecord] = []
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        if name in ("name", "sources") or (value is None and name not in ("tiles", "nodes")):
            continue
        if isinstance(value, LinkSpec):
            figures.append(FigureRecord(name=name, value=value.name, source=spec.sources[name]))
            for part in ("bandwidth_bytes_per_s", "latency_s"):
                figures.append(
                    FigureRecord(name=f"{name}_{part}", value=getattr(value, part), source=value.sources[part])
                )
        elif value is None:
            text, source = ("as many as it takes", "a choice") if name == "nodes" else ("not published", "none")
            figures.append(FigureRecord(name=name, value=text, source=source))
        else:
            figures.append(FigureRecord(name=name, value=value, source=spec.sources.get(name, "a choice")))
    return SpecRecord(name=spec.name, figures=tuple(figures))


def _title(name: str) -> str:
    for unit in ("_bytes_per_s", "_flops_per_s", "_bytes", "_s"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def _value(name: str, value: int | float | str) -> str:
    if isinstance(value, str):
        return value
    if name.endswith("_flops_per_s"):
        return f"{format_count(value)}FLOP/s"
    if name.endswith("_bytes_per_s"):
        return f"{format_count(value)}B/s"
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_seconds(value) if name.endswith("_s") else f"{value:,.0f}"


def _tiles(at: Location) -> str:
    if at.first_tile is None or at.tiles is None:
        return "all"
    last = at.first_tile + at.tiles - 1
    return str(last) if last == at.first_tile else f"{at.first_tile}-{last}"
