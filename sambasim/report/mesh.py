"""The output of `sambasim simulate` for a replica of several ranks: tables, JSON, CSV and a plot. Everything is
predicted."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sambasim.hardware.placement import Location
from sambasim.ir.schedule import ActionKind
from sambasim.report.advice import PRICED_IN
from sambasim.report.mesh_records import NOTE, MeshRecord, mesh_record
from sambasim.report.output import Curve, add_row, json_line, plain_table, speed_chart
from sambasim.simulation.mesh import MeshStep
from sambasim.simulation.prediction import zero_note
from sambasim.units import format_bytes, format_rate, format_seconds


def mesh_json(steps: Sequence[MeshStep]) -> Iterator[str]:
    """A line for each number of replicas and sync path."""
    return (json_line(mesh_record(step).model_dump()) for step in steps)


def mesh_report(steps: Sequence[MeshStep]) -> list[RenderableType]:
    """For the fewest replicas the ranks and the axes; for each number of replicas the step."""
    first = steps[0]
    record = mesh_record(first)
    batch = f"batch {record.batch_size}" + (f" x {first.micro_steps} accumulated" if first.micro_steps > 1 else "")
    lines = [
        f"{record.name} on {first.mesh}, each rank on {first.budget.where}: predicted, not measured; {PRICED_IN}",
        f"  step    {format_seconds(record.predicted_s)}, {batch} a replica",
        *_of_schedule(record),
        *(f"  along {axis}: rank 0 waits {format_seconds(s)} of it" for axis, s in record.predicted_waited_s.items()),
    ]
    kinds = [kind for kind in ActionKind if any(_seconds(first, rank, kind) for rank in range(len(first.ranks)))]
    names = [kind.name.lower().replace("_", " ") for kind in kinds]
    stages = plain_table(
        "a micro-batch, by rank along pp" if len(first.ranks) > 1 else "a pass",
        ["rank"],
        ["sections", *names, "update"],
    )
    for rank, one in enumerate(first.ranks):
        times = [format_seconds(_seconds(first, rank, kind)) for kind in kinds]
        add_row(stages, str(rank), str(len(one.alone.sections)), *times, format_seconds(one.update_s))
    ranks = plain_table("ranks of a replica", *RANK_COLUMNS)
    for row in rank_rows(record):
        add_row(ranks, *row)
    axes = plain_table("a step, by axis", *AXIS_COLUMNS)
    for row in axis_rows(record):
        add_row(axes, *row)
    notes = Text("\n".join([NOTE, *zero_note(first.program)]))
    return [Text("\n".join(lines)), stages, ranks, axes, _scaling_table(steps), notes]


def _of_schedule(record: MeshRecord) -> list[str]:
    if record.schedule is None:
        return []
    return [f"  {record.schedule}: the ranks are idle for {record.predicted_idle_share:.1%} of their time in passes"]


RANK_COLUMNS = (
    ("rank", "mesh", "where", "stages"),
    ("parameters", "gradients", "states", "memory", "busy", "messages", "idle"),
)
"""Columns of words, and of numbers."""


def rank_rows(record: MeshRecord) -> Iterator[tuple[str, ...]]:
    for one in record.each_rank:
        place = Location(one.rank, one.node, one.rdu, one.first_tile, one.tiles)
        sizes = (one.parameter_bytes, one.gradient_bytes, one.state_bytes, one.needed_bytes)
        shares = (one.predicted_busy_share, one.predicted_messages_share, one.predicted_idle_share)
        yield (
            *(str(one.rank), in_words(one.coordinates), str(place), ", ".join(map(str, one.stages))),
            *(*map(format_bytes, sizes), *(f"{share:.1%}" for share in shares)),
        )


AXIS_COLUMNS = (("axis", "bytes, all ranks of a replica"), ("transfers of rank 0", "rank 0 waits"))


def axis_rows(record: MeshRecord) -> Iterator[tuple[str, ...]]:
    for one in record.axes:
        links = (f"{format_bytes(size)} by {name.replace('_', ' ')}" for name, size in one.received_bytes.items())
        yield (
            *(one.axis, ", ".join(links)),
            *map(format_seconds, (one.predicted_transfer_s, one.predicted_waited_s)),
        )


def in_words(coordinates: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {position}" for axis, position in coordinates.items())


def _seconds(step: MeshStep, rank: int, kind: ActionKind) -> float:
    row = step.schedule.rows[rank]
    stages = {action.stage for action in row if action.kind is kind}
    return sum(step.ranks[rank].costs[kind, stage].predicted_s for stage in stages)


SCALING_COLUMNS = (
    ("mesh", "sync"),
    ("ranks", "nodes", "step", "samples/s", "efficiency", "sync waits", "hidden"),
)


def scaling_rows(steps: Sequence[MeshStep]) -> Iterator[tuple[str, ...]]:
    for step in steps:
        yield (
            *(str(step.mesh), step.path or "none", str(step.mesh.world_size), str(step.placement.nodes)),
            *(format_seconds(step.predicted_s), format_rate(step.samples_per_s), f"{step.efficiency:.1%}"),
            *(format_seconds(step.exposed_sync_s), format_seconds(step.hidden_sync_s)),
        )


def _scaling_table(steps: Sequence[MeshStep]) -> Table:
    table = plain_table("steps", *SCALING_COLUMNS)
    for row in scaling_rows(steps):
        add_row(table, *row)
    return table


def mesh_csv_rows(steps: Sequence[MeshStep]) -> list[dict[str, object]]:
    """One flat row for each step; times by axis have a column each."""
    rows = []
    for step in steps:
        fields = mesh_record(step).model_dump(exclude={"name", "mesh", "axes", "each_rank", "backed_by"})
        waited = {f"predicted_waited_{axis}_s": seconds for axis, seconds in fields.pop("predicted_waited_s").items()}
        rows.append({"mesh": str(step.mesh), **fields, "predicted_efficiency": step.efficiency, **waited})
    return rows


def mesh_plot(of_sizes: Sequence[Sequence[MeshStep]]) -> str:
    """Samples/s over ranks as an SVG. By batch size: a curve for each way to sync, from the steps without sync on, and
    a straight line through one replica."""
    first = of_sizes[0][0]
    curves = [curve for steps in of_sizes for curve in _curves(steps, several=len(of_sizes) > 1)]
    return speed_chart(f"{first.program.name}, each rank on {first.budget.where}", "ranks", curves)


def _curves(steps: Sequence[MeshStep], *, several: bool) -> Iterator[Curve]:
    """Of one batch size; `several`: the names say which."""
    batch = f", batch {steps[0].program.replica_batch_size}" if several else ""
    points: dict[str | None, list[tuple[float, float]]] = {}
    for step in sorted(steps, key=lambda one: one.mesh.world_size):
        points.setdefault(step.path, []).append((step.mesh.world_size, step.samples_per_s))
    alone = points.pop(None, [])
    for path, found in points.items():
        yield Curve(f"sync by {path}{batch}", [*alone, *found])
    counts = sorted({step.mesh.world_size for step in steps})
    one = max((step.of_one_replica for step in steps), key=lambda one: one.samples_per_s)
    speed = one.samples_per_s / one.mesh.world_size
    yield Curve(f"linear{batch}", [(ranks, ranks * speed) for ranks in counts], is_bound=True)
