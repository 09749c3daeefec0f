"""The output of `sambasim devices` and `sambasim validate`: figures with their sources, and errors of predictions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import mean

from pydantic import Field
from rich.console import Group, RenderableType
from rich.text import Text

from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.placement import Inventory, Location, Placement
from sambasim.hardware.spec import ClusterSpec, DeviceSpec, LinkSpec, Spec
from sambasim.ir.mesh import Mesh
from sambasim.published.rows import Row
from sambasim.records import Record
from sambasim.report.output import add_row, json_line, plain_table
from sambasim.simulation.alone import MODEL_KINDS, RankAlone
from sambasim.units import format_bytes, format_count, format_seconds


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
    parts: list[RenderableType] = [_figures("device", device) for device in devices]
    parts += [_figures("cluster", cluster) for cluster in clusters]
    memory = f"{format_bytes(budget.capacity_bytes)} of {budget.off_chip}"
    share = inventory.share if inventory.tiles is not None else f"all of an {inventory.share}"
    most = placement.per_full_node
    noun = "replica" if mesh is None else "rank"
    head = (
        f"{placement.in_words(noun)}\na {noun} has {share}: {budget.units:,} compute units, {memory};"
        f" {most} {noun}s fit on a node"
    )
    columns = [noun, *(["mesh"] if mesh is not None else []), "node", "RDU", "tiles"]
    locations = plain_table(f"{noun}s", columns, [])
    for at in placement.locations():
        coordinates = [mesh.place(at.replica)] if mesh is not None else []
        add_row(locations, str(at.replica), *coordinates, str(at.node), str(at.rdu), _tiles(at))
    return [*parts, Text(head), locations]


def _figures(what: str, spec: Spec) -> RenderableType:
    table = plain_table(f"{what} {spec.name}", ["figure", "value", "source"], [])
    for name, value, source in figures_of(spec):
        add_row(table, title_of(name), value_text(name, value), source)
    return table


def _record(spec: Spec) -> Mapping[str, object]:
    figures = [{"name": name, "value": value, "source": source} for name, value, source in figures_of(spec)]
    return {"name": spec.name, "figures": figures}


def figures_of(spec: Spec) -> list[tuple[str, int | float | str, str]]:
    figures: list[tuple[str, int | float | str, str]] = []
    for name in type(spec).model_fields:
        value = getattr(spec, name)
        if name in ("name", "sources") or (value is None and name not in ("tiles", "nodes")):
            continue
        if isinstance(value, LinkSpec):
            figures.append((name, value.name, spec.sources[name]))
            for part in ("bandwidth_bytes_per_s", "latency_s"):
                figures.append((f"{name}_{part}", getattr(value, part), value.sources[part]))
        elif value is None:
            figures.append(
                (name, "as many as it takes", "a choice") if name == "nodes" else (name, "not published", "none")
            )
        else:
            figures.append((name, value, spec.sources.get(name, "a choice")))
    return figures


def title_of(name: str) -> str:
    for unit in ("_bytes_per_s", "_flops_per_s", "_bytes", "_s"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def value_text(name: str, value: int | float | str) -> str:
    if isinstance(value, str):
        return value
    if name.endswith("_flops_per_s"):
        return f"{format_count(value)}FLOP/s"
    if name.endswith("_bytes_per_s"):
        return f"{format_count(value)}B/s"
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_seconds(value) if name.endswith("_s") or name.startswith("host_s") else f"{value:,g}"


def _tiles(at: Location) -> str:
    if at.first_tile is None or at.tiles is None:
        return "all"
    last = at.first_tile + at.tiles - 1
    return str(last) if last == at.first_tile else f"{at.first_tile}-{last}"


class RowRecord(Record):
    """One published row and its prediction. `error` is a fraction of the published value."""

    name: str
    device: str
    tiles: int | None
    level: str
    figure: str
    published: float
    predicted: float
    error: float
    published_host_s: float | None
    predicted_host_s: float | None
    published_sections: int | None
    predicted_sections: int
    published_units_share: float | None
    predicted_units_share: float
    source: str
    replicas: int = Field(exclude=True)

    @property
    def host_error(self) -> float | None:
        """The relative error of the host time; None if it was not published."""
        if self.published_host_s is None or self.predicted_host_s is None:
            return None
        return self.predicted_host_s / self.published_host_s - 1


class ErrorRecord(Record):
    """Errors as fractions of the published values, of the rows of one level or of host times."""

    mean: float
    worst: float

    @classmethod
    def of(cls, errors: Iterable[float]) -> "ErrorRecord":
        found = list(map(abs, errors))
        return cls(mean=mean(found), worst=max(found))

    def __str__(self) -> str:
        return f"{self.mean:.1%} in the mean, {self.worst:.1%} at worst"


class ValidationRecord(Record):
    """What `sambasim validate --json` prints. Mean errors are of absolute values. `left_out` is the error of each level
    on rows of a width that was not used for calibration."""

    rows: tuple[RowRecord, ...]
    mean_error: float
    mean_host_error: float | None
    fitted: Mapping[str, ErrorRecord]
    left_out: Mapping[str, ErrorRecord]


def row_record(row: Row, predicted: float, step: RankAlone) -> RowRecord:
    """`row` beside its prediction: `predicted`, in the unit of the row's figure, and `step`, of one replica."""
    model = [section for section in step.sections if section.kind in MODEL_KINDS]
    return RowRecord(
        name=row.name,
        device=row.device,
        tiles=row.tiles,
        level=row.level,
        figure=row.figure,
        published=row.value,
        predicted=predicted,
        error=predicted / row.value - 1,
        published_host_s=row.host_s,
        predicted_host_s=None if row.host_s is None else step.host_s,
        published_sections=row.sections,
        predicted_sections=len(model),
        published_units_share=row.units_share,
        predicted_units_share=max(section.price.units for section in model) / step.budget.units,
        source=row.source,
        replicas=row.replicas,
    )


def validation(rows: Sequence[RowRecord]) -> ValidationRecord:
    errors: dict[str, list[float]] = {}
    for row in rows:
        errors.setdefault(row.level, []).append(row.error)
        if row.host_error is not None:
            errors.setdefault("host", []).append(row.host_error)
        if row.published_sections is not None:
            errors.setdefault("sections", []).append(row.predicted_sections / row.published_sections - 1)
    fitted = {name: ErrorRecord.of(found) for name, found in errors.items()}
    return ValidationRecord(
        rows=tuple(rows),
        mean_error=mean(abs(row.error) for row in rows),
        mean_host_error=fitted["host"].mean if "host" in fitted else None,
        fitted=fitted,
        left_out={
            name: ErrorRecord(mean=one.mean_error, worst=one.worst_error)
            for name, one in load_calibration().fit.left_out.items()
        },
    )


_UNITS = {"device_s": "s", "samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}


def validation_table(record: ValidationRecord) -> Group:
    columns = [
        "published",
        "predicted",
        "error",
        "host",
        "predicted",
        "sections",
        "predicted",
        "most units",
        "predicted",
    ]
    table = plain_table("published and predicted", ["row", "device", "level"], columns)
    for row in record.rows:
        tiles = f"{row.device}, {row.tiles} tiles" if row.tiles else row.device
        place = f"{row.replicas} x {tiles}" if row.replicas > 1 else tiles
        figures = (f"{figure:.4g} {_UNITS[row.figure]}" for figure in (row.published, row.predicted))
        host = ("" if time_s is None else f"{time_s:.3g} s" for time_s in (row.published_host_s, row.predicted_host_s))
        sections = ("" if row.published_sections is None else str(row.published_sections), str(row.predicted_sections))
        shares = row.published_units_share, row.predicted_units_share
        units = ("" if share is None or row.published_units_share is None else f"{share:.0%}" for share in shares)
        add_row(table, row.name, place, row.level, *figures, f"{row.error:+.1%}", *host, *sections, *units)
    notes = ["errors of these rows, on which the model is calibrated (device seconds are without host time):"]
    notes += [f"  {name:9}{error}" for name, error in record.fitted.items()]
    notes.append("errors of rows of a width that was not used for calibration, each width in turn:")
    notes += [f"  {name:9}{error}" for name, error in record.left_out.items()]
    notes += ["sources:", *(f"  {source}" for source in dict.fromkeys(row.source for row in record.rows))]
    notes.append("no publication measured gradient sync alone, so its predictions are not validated")
    return Group(table, Text("\n".join(notes)))
