"""What there is to say of the predicted step of a mesh: what each rank holds and where it is, what goes over the links,
what the ranks wait for. Tables, JSON, CSV and the page of `report` show these records."""

from collections.abc import Iterator

from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE
from sambasim.ir.types import SymbolKind
from sambasim.records import Record
from sambasim.report.summaries import held_bytes
from sambasim.simulation.mesh import MeshStep
from sambasim.simulation.sync import Traffic

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


class MeshRecord(Record):
    """The step of one number of replicas with one way to sync; `sync` is None if there is nothing to sync. `batch_size`
    is that of a replica in a micro-step."""

    name: str
    mesh: dict[str, int]
    ranks: int
    nodes: int
    replicas: int
    chips: int
    batch_size: int
    sync: str | None
    schedule: str | None
    predicted_s: float
    predicted_samples_per_s: float
    predicted_pass_s: float
    predicted_idle_share: float
    predicted_waited_s: dict[str, float]
    predicted_update_s: float
    predicted_exposed_sync_s: float
    predicted_hidden_sync_s: float
    axes: tuple[AxisRecord, ...]
    each_rank: tuple[RankRecord, ...]
    backed_by: str


def mesh_record(step: MeshStep) -> MeshRecord:
    return MeshRecord(
        name=step.program.name,
        mesh=dict(step.mesh.sizes),
        ranks=step.mesh.world_size,
        nodes=step.placement.nodes,
        replicas=step.replicas,
        chips=step.program.chips,
        batch_size=step.program.replica_batch_size,
        sync=step.path,
        schedule=step.schedule.name if step.program.schedule is not None else None,
        predicted_s=step.predicted_s,
        predicted_samples_per_s=step.samples_per_s,
        predicted_pass_s=step.pass_s,
        predicted_idle_share=step.idle_share,
        predicted_waited_s=dict(step.waited_s),
        predicted_update_s=step.update_s,
        predicted_exposed_sync_s=step.exposed_sync_s,
        predicted_hidden_sync_s=step.hidden_sync_s,
        axes=tuple(_axes(step)),
        each_rank=tuple(_ranks(step)),
        backed_by=NOTE,
    )


def _ranks(step: MeshStep) -> Iterator[RankRecord]:
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


def _axes(step: MeshStep) -> Iterator[AxisRecord]:
    """A record for each mesh axis of several ranks: its traffic, and how long the ranks waited."""
    positions = range(len(step.ranks))
    ranks_each = step.program.ranks_of_replica // len(positions)
    times = [step.times_of(position) for position in positions]
    for axis in (axis for axis, size in step.mesh.sizes.items() if size > 1):
        if axis == DATA_PARALLEL:
            synced = [Traffic(one.scaled.sync_s, one.scaled.received_bytes) for one in step.ranks]
            traffic = [one.gathered + sync for one, sync in zip(times, synced, strict=True)]
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
