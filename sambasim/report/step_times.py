"""The steps of a run: what they took here, and beside it, in its own column, what a device is predicted to take."""

from rich.console import RenderableType

from sambasim.records.metrics import SummaryRecord
from sambasim.report.tables import add_row, plain_table, printable
from sambasim.units import format_rate, format_seconds

_NOTHING = "-"
"""Where nothing was measured, or nothing is predicted."""


def step_times(summary: SummaryRecord) -> list[RenderableType]:
    """The table of one step in the mean, and the sentence that says what backs the prediction, or why there is none."""
    steps, predicted = summary.steps, summary.predicted
    if predicted is None:
        return [printable(f"no prediction for a device: {summary.not_predicted}")]
    sync_s = summary.sync_share * summary.training_s
    rows = (
        ("whole step", summary.training_s, predicted.predicted_step_s),
        ("forward and backward", summary.model_s, predicted.predicted_model_s),
        ("sync that is waited for", sync_s, predicted.predicted_sync_s),
        ("update", max(0.0, summary.training_s - summary.model_s - sync_s), predicted.predicted_update_s),
        ("host: sections, inputs, outputs", None, predicted.predicted_host_s),
        ("sync behind the backward", summary.hidden_sync_s, predicted.predicted_hidden_sync_s),
    )
    table = plain_table(
        "one step, in the mean", ["what"], ["measured on this machine", f"predicted for {predicted.predicted_for}"]
    )
    for name, measured_s, predicted_s in rows:
        if measured_s or predicted_s:
            measured = _NOTHING if measured_s is None else format_seconds(measured_s / steps)
            add_row(table, name, measured, format_seconds(predicted_s))
    add_row(table, "samples/s", format_rate(summary.samples_per_s), format_rate(predicted.predicted_samples_per_s))
    lines = [f"predicted: {predicted.predicted_backed_by}"]
    if summary.emulated:
        lines.insert(0, f"measured: one process, which played all {summary.world_size} replicas in turn")
    if summary.host_sync not in (None, "mpi"):
        lines.append(f"predicted as if hosts exchanged gradients as equals, not by {summary.host_sync}")
    return [table, printable("\n".join(lines))]
