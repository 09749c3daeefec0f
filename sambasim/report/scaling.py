"""How a predicted step scales: one row for each batch size, number of replicas, and way to sync; and curves of it."""

import csv
import io
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from sambasim.report.log_chart import Chart, Curve, log_chart
from sambasim.report.tables import add_row, plain_table
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.scaling import ScaledStep
from sambasim.simulation.step import PredictedStep
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_bytes, format_rate, format_seconds


class ScalingRecord(BaseModel):
    """One row. `sync` is None for one replica; `batch_size` is that of a replica's micro-step; `efficiency` compares
    with the samples per second of one replica alone, and may exceed 1 where replicas share the update."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: int
    replicas: int
    nodes: int
    sync: str | None
    predicted_s: float
    predicted_samples_per_s: float
    predicted_efficiency: float
    predicted_exposed_sync_s: float
    predicted_hidden_sync_s: float
    predicted_sync_share: float
    bytes_per_rdu: int
    way: str


def scaling_records(prediction: Prediction, paths: Sequence[SyncPath]) -> tuple[ScalingRecord, ...]:
    """A row for each number of replicas and each of `paths`; what does not sync has one."""
    rows = []
    for steps in zip(*(prediction.scaled[path] for path in paths), strict=True):
        rows += [_record(prediction.alone, step) for step in (steps if steps[0].path else steps[:1])]
    return tuple(rows)


def _record(alone: PredictedStep, scaled: ScaledStep) -> ScalingRecord:
    return ScalingRecord(
        batch_size=alone.batch_size,
        replicas=scaled.placement.replicas,
        nodes=scaled.placement.nodes,
        sync=scaled.path,
        predicted_s=scaled.predicted_s,
        predicted_samples_per_s=scaled.samples_per_s,
        predicted_efficiency=scaled.efficiency(alone),
        predicted_exposed_sync_s=scaled.exposed_sync_s,
        predicted_hidden_sync_s=scaled.hidden_sync_s,
        predicted_sync_share=scaled.sync_share,
        bytes_per_rdu=alone.need.size_bytes * scaled.placement.on_an_rdu,
        way=scaled.way,
    )


def scaling_table(records: Sequence[ScalingRecord]) -> Table:
    """For a terminal."""
    numbers = ["step", "samples/s", "efficiency", "sync waits", "share", "hidden", "memory of an RDU"]
    table = plain_table("replicas, predicted", ["batch", "replicas", "nodes", "sync"], numbers)
    for record in records:
        add_row(
            table,
            *(str(record.batch_size), str(record.replicas), str(record.nodes), record.sync or ""),
            format_seconds(record.predicted_s),
            format_rate(record.predicted_samples_per_s),
            f"{record.predicted_efficiency:.1%}",
            format_seconds(record.predicted_exposed_sync_s),
            f"{record.predicted_sync_share:.1%}",
            format_seconds(record.predicted_hidden_sync_s),
            format_bytes(record.bytes_per_rdu),
        )
    return table


def scaling_csv(records: Sequence[ScalingRecord]) -> str:
    """With a line of names first."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(ScalingRecord.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(record.model_dump() for record in records)
    return text.getvalue()


def scaling_plot(title: str, records: Sequence[ScalingRecord]) -> str:
    """Samples per second over replicas as an SVG, a curve for each batch size and way to sync, and what as many
    replicas would do that need no sync. Rows of one replica begin every curve of their batch size."""
    ways = dict.fromkeys((record.batch_size, record.sync) for record in records if record.sync)
    curves = []
    for batch_size, sync in ways:
        rows = [row for row in records if row.batch_size == batch_size and row.sync in (None, sync)]
        points = [(row.replicas, row.predicted_samples_per_s) for row in rows]
        curves.append(Curve(f"{sync}, batch {batch_size}", sorted(points)))
    for batch_size in dict.fromkeys(record.batch_size for record in records):
        rows = [row for row in records if row.batch_size == batch_size]
        alone = rows[0].predicted_samples_per_s / rows[0].predicted_efficiency / rows[0].replicas
        counts = sorted({row.replicas for row in rows})
        curves.append(Curve(f"no sync, batch {batch_size}", [(n, n * alone) for n in counts], is_bound=True))
    return log_chart(
        Chart(
            title=f"{title}: predicted, not measured",
            x_title="replicas",
            y_title="samples per second",
            x_words=lambda replicas: f"{replicas:.0f}",
            y_words=format_rate,
            curves=curves,
        )
    )
