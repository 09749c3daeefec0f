"""The outputs of `sambasim devices`, figures with their sources and the placement of replicas or ranks, and of
`sambasim validate`, published measurements beside their predictions, and the errors."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.placement import Inventory, Location, Placement
from sambasim.hardware.spec import ClusterSpec, DeviceSpec, LinkSpec, Spec
from sambasim.ir.mesh import Mesh
from sambasim.published import Row as PublishedRow
from sambasim.report.tables import Row, Table, json_line, table, text_of, text_table, title_of
from sambasim.simulation.alone import RankAlone
from sambasim.units import format_bytes


class Placed(NamedTuple):
    """What to list, and replicas on RDUs of `inventory`; `mesh`: of a PEF whose replicas have several ranks."""

    devices: Sequence[DeviceSpec]
    clusters: Sequence[ClusterSpec]
    inventory: Inventory
    placement: Placement
    mesh: Mesh | None


def inventory_json(placed: Placed) -> str:
    """In SI base units. `placement` has the node, RDU and tiles of each replica, or of each rank of `mesh`."""
    devices, clusters, inventory, placement, mesh = placed
    places = [asdict(at) if mesh is None else rank_fields(at, mesh) for at in placement.locations()]
    listed = {"devices": list(map(_record, devices)), "clusters": list(map(_record, clusters))}
    names = {"device": inventory.device.name, "cluster": inventory.cluster.name, "nodes": inventory.cluster.nodes}
    per_node = {"replicas_per_node" if mesh is None else "ranks_per_node": placement.per_full_node}
    return json_line({**listed, **names, **per_node, "placement": places})


def rank_fields(at: Location, mesh: Mesh) -> dict[str, object]:
    """The place of a rank, in the mesh and on the hardware."""
    fields = asdict(at)
    rank = fields.pop("replica")
    return {"rank": rank, "coordinates": mesh.coordinates(rank), **fields}


def inventory_report(placed: Placed) -> list[RenderableType]:
    devices, clusters, inventory, placement, mesh = placed
    budget = budget_of(inventory.device, inventory.tiles)
    kinds = (("device", devices), ("cluster", clusters))
    figures = [figures_table(f"{kind} {spec.name}", spec) for kind, specs in kinds for spec in specs]
    memory = f"{format_bytes(budget.capacity_bytes)} of {budget.off_chip}"
    share = inventory.share if inventory.tiles is not None else f"all of an {inventory.share}"
    noun, first = ("replica", "replica") if mesh is None else ("rank", "replica:rank, mesh")
    head = (
        f"{placement.in_words(noun)}\na {noun} has {share}: {budget.units:,} compute units, {memory};"
        f" {placement.per_full_node} {noun}s fit on a node"
    )
    places = placement.locations()
    rows = [{"replica": at.replica, "mesh": mesh and mesh.place(at.replica), "where": at} for at in places]
    return [*figures, Text(head), table(f"{noun}s", rows, f"{first}, where")]


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
            for part in value.sources:
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


def row_record(row: PublishedRow, predicted: float, step: RankAlone) -> Row:
    """`row` beside its prediction: `predicted`, in the unit of the row's figure, and `step`, of one replica. `error` is
    a fraction of the published value."""
    units = max(section.price.units for section in step.model) / step.budget.units
    return Row(
        **{name: getattr(row, name) for name in ("name", "device", "tiles", "replicas", "level", "figure")},
        **{"published": row.value, "predicted": predicted, "error": predicted / row.value - 1},
        **{"published_host_s": row.host_s, "predicted_host_s": None if row.host_s is None else step.host_s},
        **{"published_sections": row.sections, "predicted_sections": len(step.model)},
        **{"published_units_share": row.units_share, "predicted_units_share": units},
        source=row.source,
    )


def validation(rows: Sequence[Row]) -> Row:
    """With the mean and worst errors by level and of host times: of these rows, and of widths that were left out."""
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for row in rows:
        errors[row.level].append(abs(row.error))
        if row.published_host_s is not None:
            errors["host"].append(abs(row.predicted_host_s / row.published_host_s - 1))
        if row.published_sections is not None:
            errors["sections"].append(abs(row.predicted_sections / row.published_sections - 1))
    left_out = load_calibration().fit.left_out.items()
    return Row(
        rows=rows,
        mean_error=mean(abs(row.error) for row in rows),
        mean_host_error=mean(errors["host"]) if "host" in errors else None,
        fitted={name: Row(mean=mean(sizes), worst=max(sizes)) for name, sizes in errors.items()},
        left_out={name: Row(mean=fit.mean_error, worst=fit.worst_error) for name, fit in left_out},
    )


_UNITS = {"device_s": "s", "samples_per_s": "samples/s", "tokens_per_s": "tokens/s"}
_FIGURES = ("published", "predicted", "error", "host", "predicted", "sections", "predicted", "most units", "predicted")


def validation_table(record: Row) -> Group:
    def errors(by_name: Mapping[str, Row]) -> list[str]:
        return [f"  {name:9}{of.mean:.1%} in the mean, {of.worst:.1%} at worst" for name, of in by_name.items()]

    shown = text_table("published and predicted", ("row", "device", "level"), _FIGURES, map(_cells, record.rows))
    notes = [
        "errors of these rows, on which the model is calibrated (device seconds are without host time):",
        *errors(record.fitted),
        "errors of rows of a width that was not used for calibration, each width in turn:",
        *errors(record.left_out),
        "sources:",
        *(f"  {source}" for source in dict.fromkeys(row.source for row in record.rows)),
        "no publication measured gradient sync alone, so its predictions are not validated",
    ]
    return Group(shown, Text("\n".join(notes)))


def _cells(row: Row) -> Sequence[str]:
    tiles = f"{row.device}, {row.tiles} tiles" if row.tiles else row.device
    place = f"{row.replicas} x {tiles}" if row.replicas > 1 else tiles
    figures = (f"{figure:.4g} {_UNITS[row.figure]}" for figure in (row.published, row.predicted))
    host = ("" if time_s is None else f"{time_s:.3g} s" for time_s in (row.published_host_s, row.predicted_host_s))
    sections = ("" if row.published_sections is None else str(row.published_sections), str(row.predicted_sections))
    shares = row.published_units_share, row.predicted_units_share
    units = ("" if row.published_units_share is None else f"{share:.0%}" for share in shares)
    return row.name, place, row.level, *figures, f"{row.error:+.1%}", *host, *sections, *units
