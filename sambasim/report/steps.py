"""What there is to say of the predicted step of each number of replicas and way to sync: what each rank holds and where
it is, what goes over the links, what ranks wait for. Tables, JSON, CSV, plots and the page of `report` show it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.table import Table

from sambasim.hardware.placement import Location
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE
from sambasim.ir.types import SymbolKind
from sambasim.records import Record
from sambasim.report.output import Curve, add_row, plain_table, speed_chart
from sambasim.report.summaries import held_bytes
from sambasim.simulation.step import PredictedStep
from sambasim.simulation.sync import Traffic
from sambasim.units import format_bytes, format_rate, format_seconds

NOTE = (
    "pipeline and tensor parallelism are not validated: messages take the published bandwidths and latencies of links; "
    "no step of several RDUs was ever published"
)


class RankRecord(Record):
    """One rank of the first replica: its RDU and tiles, None for a whole RDU, and what it holds, without ZeRO.
    `needed_bytes` includes tensors between sections. The shares are of its time in passes, and add up to 1: on the
    device or the host, in messages, and waiting for other stages."""

    rank: int
    coordinates: dict[str, int]
    node: int
    rdu: int
    first_tile: int | None
    tiles: int | None
    stages: tuple[int, ...]
    parameter_bytes: int
    gradient_bytes: int
    state_bytes: int
    needed_bytes: int
    predicted_busy_share: float
    predicted_messages_share: float
    predicted_idle_share: float


class AxisRecord(Record):
    """Along one mesh axis, in a step: the bytes that all ranks of a replica receive, by link of the cluster, over host
    links also what they send; how long rank 0 transfers, on dp with what overlaps, on pp with copies of tied
    parameters in its update; and how long it waits, on pp with idle time."""

    axis: str
    received_bytes: dict[str, int]
    predicted_transfer_s: float
    predicted_waited_s: float


class StepRecord(Record):
    """The step of one number of replicas with one way to sync; `sync` is None if there is nothing to sync. `batch_size`
    is that of a replica in a micro-step. The efficiency is relative to replicas that share the update and never wait,
    or, if they have several ranks, to the samples/s of one replica."""

    name: str
    mesh: dict[str, int]
    ranks: int
    nodes: int
    replicas: int
    chips: int
    batch_size: int
    sync: str | None
    way: str
    schedule: str | None
    predicted_s: float
    predicted_samples_per_s: float
    predicted_efficiency: float
    predicted_pass_s: float
    predicted_idle_share: float
    predicted_waited_s: dict[str, float]
    predicted_update_s: float
    predicted_exposed_sync_s: float
    predicted_hidden_sync_s: float
    predicted_sync_share: float
    bytes_per_rdu: int
    axes: tuple[AxisRecord, ...]
    each_rank: tuple[RankRecord, ...]
    backed_by: str


def step_record(step: PredictedStep) -> StepRecord:
    fullest_bytes = max(rank.alone.need.size_bytes for rank in step.ranks)
    return StepRecord(
        name=step.program.name,
        mesh=dict(step.mesh.sizes),
        ranks=step.mesh.world_size,
        nodes=step.placement.nodes,
        replicas=step.replicas,
        chips=step.program.chips,
        batch_size=step.batch_size,
        sync=step.path,
        way=step.synced.way,
        schedule=step.schedule.name if step.program.schedule is not None else None,
        predicted_s=step.predicted_s,
        predicted_samples_per_s=step.samples_per_s,
        predicted_efficiency=step.efficiency,
        predicted_pass_s=step.passes.predicted_s,
        predicted_idle_share=step.idle_share,
        predicted_waited_s=dict(step.waited_s),
        predicted_update_s=step.update_s,
        predicted_exposed_sync_s=step.exposed_sync_s,
        predicted_hidden_sync_s=step.hidden_sync_s,
        predicted_sync_share=step.exposed_sync_s / step.predicted_s,
        bytes_per_rdu=fullest_bytes * step.placement.on_an_rdu,
        axes=tuple(_axes(step)),
        each_rank=tuple(_ranks(step)),
        backed_by=NOTE if step.several_ranks else "",
    )


def _ranks(step: PredictedStep) -> Iterator[RankRecord]:
    for at in step.placement.locations()[: step.program.ranks_of_replica]:
        coordinates = step.mesh.coordinates(at.replica)
        position = coordinates.get(PIPELINE, 0)
        own, times = step.ranks[position], step.times_of(position)
        held = held_bytes(own.program)
        yield RankRecord(
            rank=at.replica,
            coordinates=dict(coordinates),
            node=at.node,
            rdu=at.rdu,
            first_tile=at.first_tile,
            tiles=at.tiles,
            stages=tuple(step.schedule.stages_of(position)),
            parameter_bytes=held[SymbolKind.PARAMETER],
            gradient_bytes=held[SymbolKind.GRADIENT],
            state_bytes=held[SymbolKind.OPTIMIZER_STATE],
            needed_bytes=own.alone.need.size_bytes,
            predicted_busy_share=times.busy_s / step.passes_s,
            predicted_messages_share=times.messages_s / step.passes_s,
            predicted_idle_share=times.idle_s / step.passes_s,
        )


def _axes(step: PredictedStep) -> Iterator[AxisRecord]:
    positions = range(len(step.ranks))
    ranks_each = step.program.ranks_of_replica // len(positions)
    times = [step.times_of(position) for position in positions]
    for axis in (axis for axis, size in step.mesh.sizes.items() if size > 1):
        if axis == DATA_PARALLEL:
            traffic = [one.gathered + rank.synced.moved for one, rank in zip(times, step.ranks, strict=True)]
            waited_s = step.exposed_sync_s
        else:
            traffic, waited_s = [one.messages[axis] for one in times], step.waited_s[axis]
            if axis == PIPELINE:
                traffic = [sum(rank.copies.values(), one) for rank, one in zip(step.ranks, traffic, strict=True)]
        total = sum(traffic, Traffic()) * ranks_each
        received = {wire.value: round(size_bytes) for wire, size_bytes in total.received_bytes.items() if size_bytes}
        yield AxisRecord(
            axis=axis,
            received_bytes=received,
            predicted_transfer_s=traffic[0].predicted_s,
            predicted_waited_s=waited_s,
        )


RANK_COLUMNS = (
    ("rank", "mesh", "where", "stages"),
    ("parameters", "gradients", "states", "memory", "busy", "messages", "idle"),
)
"""Columns of words, and of numbers."""


def rank_rows(record: StepRecord) -> Iterator[tuple[str, ...]]:
    for one in record.each_rank:
        place = Location(one.rank, one.node, one.rdu, one.first_tile, one.tiles)
        sizes = (one.parameter_bytes, one.gradient_bytes, one.state_bytes, one.needed_bytes)
        shares = (one.predicted_busy_share, one.predicted_messages_share, one.predicted_idle_share)
        coordinates = ", ".join(f"{axis} {position}" for axis, position in one.coordinates.items())
        yield (
            *(str(one.rank), coordinates, str(place), ", ".join(map(str, one.stages))),
            *(*map(format_bytes, sizes), *(f"{share:.1%}" for share in shares)),
        )


AXIS_COLUMNS = (("axis", "bytes, all ranks of a replica"), ("transfers of rank 0", "rank 0 waits"))


def axis_rows(record: StepRecord) -> Iterator[tuple[str, ...]]:
    for one in record.axes:
        links = (f"{format_bytes(size)} by {name.replace('_', ' ')}" for name, size in one.received_bytes.items())
        yield (
            *(one.axis, ", ".join(links)),
            *map(format_seconds, (one.predicted_transfer_s, one.predicted_waited_s)),
        )


_SCALING_NUMBERS = ("step", "samples/s", "efficiency", "sync waits", "share", "hidden", "memory of an RDU")


def scaling_columns(step: PredictedStep) -> tuple[Sequence[str], Sequence[str]]:
    """Columns of words, and of numbers."""
    if step.several_ranks:
        return ("batch", "mesh", "nodes", "sync"), ("ranks", *_SCALING_NUMBERS)
    return ("batch", "replicas", "nodes", "sync"), _SCALING_NUMBERS


def scaling_rows(steps: Sequence[PredictedStep]) -> Iterator[tuple[str, ...]]:
    for step in steps:
        record = step_record(step)
        yield (
            *(str(record.batch_size), str(step.mesh if step.several_ranks else record.replicas), str(record.nodes)),
            *(record.sync or "none", *([str(record.ranks)] if step.several_ranks else [])),
            *(format_seconds(record.predicted_s), format_rate(record.predicted_samples_per_s)),
            *(f"{record.predicted_efficiency:.1%}", format_seconds(record.predicted_exposed_sync_s)),
            *(f"{record.predicted_sync_share:.1%}", format_seconds(record.predicted_hidden_sync_s)),
            format_bytes(record.bytes_per_rdu),
        )


def scaling_table(steps: Sequence[PredictedStep]) -> Table:
    return filled_table("replicas, predicted", scaling_columns(steps[0]), scaling_rows(steps))


def filled_table(title: str, columns: tuple[Sequence[str], Sequence[str]], rows: Iterable[Sequence[str]]) -> Table:
    table = plain_table(title, *columns)
    for row in rows:
        add_row(table, *row)
    return table


def csv_rows(steps: Sequence[PredictedStep]) -> list[Mapping[str, object]]:
    """One flat row for each step; times by axis have a column each."""
    rows: list[Mapping[str, object]] = []
    for step in steps:
        fields = step_record(step).model_dump(exclude={"name", "mesh", "axes", "each_rank", "backed_by"})
        waited = {f"predicted_waited_{axis}_s": seconds for axis, seconds in fields.pop("predicted_waited_s").items()}
        rows.append({"mesh": str(step.mesh), **fields, **waited})
    return rows


def scaling_plot(of_sizes: Sequence[Sequence[PredictedStep]]) -> str:
    """Samples/s over ranks as an SVG: a curve for each batch size and way to sync, from the steps without sync on, and
    the ideal without waiting."""
    curves = [curve for steps in of_sizes for curve in _curves(steps)]
    return speed_chart(on_device(of_sizes[0][0]), "ranks", curves)


def on_device(step: PredictedStep) -> str:
    """`digits on SN30`; of several ranks, `digits on dp 1 × pp 2, each rank on SN30`."""
    return f"{step.program.name} on {f'{step.mesh}, each rank on ' if step.several_ranks else ''}{step.budget.where}"


def _curves(steps: Sequence[PredictedStep]) -> Iterator[Curve]:
    batch = f", batch {steps[0].batch_size}"
    points: dict[str | None, list[tuple[float, float]]] = {}
    ideal: dict[int, float] = {}
    for step in sorted(steps, key=lambda step: step.mesh.world_size):
        ranks = step.mesh.world_size
        points.setdefault(step.path, []).append((ranks, step.samples_per_s))
        ideal[ranks] = max(ideal.get(ranks, 0.0), step.ideal_samples_per_s)
    alone = points.pop(None, [])
    for path, found in points.items():
        yield Curve(f"sync by {path}{batch}", [*alone, *found])
    yield Curve(f"no sync{batch}", list(ideal.items()), is_bound=True)
