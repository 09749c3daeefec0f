"""What there is to say of the predicted step of each number of replicas and way to sync: what each rank holds and where
it is, what goes over the links, what ranks wait for. Tables, JSON, CSV, plots and the page of `report` show it."""

from collections.abc import Iterator, Mapping, Sequence

from sambasim.hardware.placement import Location
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE
from sambasim.ir.types import SymbolKind
from sambasim.records import Record
from sambasim.report.summaries import held_bytes
from sambasim.report.svg import Curve, speed_chart
from sambasim.report.tables import Table, table, text_table
from sambasim.simulation.step import PredictedStep
from sambasim.simulation.sync import Traffic
from sambasim.units import format_bytes, format_seconds

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
            axis=axis, received_bytes=received, predicted_transfer_s=traffic[0].predicted_s, predicted_waited_s=waited_s
        )


def ranks_table(record: StepRecord) -> Table:
    rows = [
        {
            **rank.model_dump(),
            "mesh": ", ".join(f"{axis} {position}" for axis, position in rank.coordinates.items()),
            "where": str(Location(rank.rank, rank.node, rank.rdu, rank.first_tile, rank.tiles)),
        }
        for rank in record.each_rank
    ]
    sizes = "parameter_bytes:parameters, gradient_bytes:gradients, state_bytes:states, needed_bytes:memory"
    shares = "predicted_busy_share:busy, predicted_messages_share:messages, predicted_idle_share:idle"
    return table("ranks of a replica", rows, "rank, mesh, where, stages", f"{sizes}, {shares}")


def axes_table(record: StepRecord) -> Table:
    def links(axis: AxisRecord) -> str:
        received = axis.received_bytes.items()
        return ", ".join(f"{format_bytes(size)} by {name.replace('_', ' ')}" for name, size in received)

    rows = [
        (axis.axis, links(axis), format_seconds(axis.predicted_transfer_s), format_seconds(axis.predicted_waited_s))
        for axis in record.axes
    ]
    words, numbers = ("axis", "bytes, all ranks of a replica"), ("transfers of rank 0", "rank 0 waits")
    return text_table("a step, by axis", words, numbers, rows)


_SCALING = (
    "predicted_s:step, predicted_samples_per_s:samples/s, predicted_efficiency:efficiency, "
    "predicted_exposed_sync_s:sync waits, predicted_sync_share:share, predicted_hidden_sync_s:hidden, "
    "rdu_bytes:memory of an RDU"
)


def scaling_table(steps: Sequence[PredictedStep]) -> Table:
    several = steps[0].several_ranks
    rows = [
        {
            **record.model_dump(),
            "mesh": str(step.mesh),
            "sync": record.sync or "none",
            "rdu_bytes": record.bytes_per_rdu,
        }
        for step, record in zip(steps, map(step_record, steps), strict=True)
    ]
    words = f"batch_size:batch, {'mesh' if several else 'replicas'}, nodes, sync"
    return table("replicas, predicted", rows, words, f"ranks, {_SCALING}" if several else _SCALING)


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
