"""How a predicted step scales: one row for each batch size, number of replicas, and way to sync."""

import csv
import io
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict
from rich.table import Table

from sambasim.report.tables import add_row, plain_table
from sambasim.simulation.scaling import ScaledStep
from sambasim.simulation.step import PredictedStep
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


def scaling_record(alone: PredictedStep, scaled: ScaledStep) -> ScalingRecord:
    """The row of `scaled`, beside the step of one replica `alone`."""
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
