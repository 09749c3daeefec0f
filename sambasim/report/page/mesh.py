"""Predicted parts about a replica of several ranks: what each of them holds and waits for."""

from sambasim.report.advice import PRICED_IN
from sambasim.report.page import ui
from sambasim.report.page.timeline import message_colour, ranks_at, schedule
from sambasim.report.steps import StepRecord, axes_table, ranks_table, step_record
from sambasim.simulation.advice import on_a_node
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.step import PredictedStep
from sambasim.simulation.sync import SyncPath
from sambasim.units import counted, format_bytes, format_seconds, plain_rate


def parts_of(prediction: Prediction) -> list[ui.Part]:
    step = prediction.steps[SyncPath.RDU][on_a_node(prediction)]
    record = step_record(step)
    return [_summary(step, record), schedule(step), _ranks(record), _axes(record)]


def _summary(step: PredictedStep, record: StepRecord) -> ui.Part:
    most = max(record.each_rank, key=lambda one: one.needed_bytes)
    capacity = format_bytes(step.budget.capacity_bytes)
    figures = [
        ("step", format_seconds(record.predicted_s), f"{record.ranks} ranks: {step.mesh}"),
        (
            "throughput",
            plain_rate(record.predicted_samples_per_s),
            f"samples/s, by {counted(record.replicas, 'replica')}",
        ),
        ("idle", f"{record.predicted_idle_share:.1%}", "of the ranks' time in passes"),
        ("memory", format_bytes(most.needed_bytes), f"of {capacity}, the most: rank {most.rank}"),
    ]
    if record.sync is not None:
        hidden = f"{format_seconds(record.predicted_hidden_sync_s)} more overlap with the backward"
        figures.append(("sync waits", format_seconds(record.predicted_exposed_sync_s), hidden))
    bars = [
        ui.shares(f"{format_seconds(record.predicted_s)} of {ranks_at(step, position)}", _shares(step, position))
        for position in sorted({0, len(step.ranks) - 1})
    ]
    return ui.Part(
        id="summary",
        title="The step at a glance",
        lead=(
            f"Numbers are of a step on {step.mesh}, {PRICED_IN}. The bars divide the time of the first and the last "
            "stage's ranks."
        ),
        body=ui.joined(ui.keys(figures), ui.element("div", *bars, class_="pair")),
    )


def _shares(step: PredictedStep, position: int) -> list[tuple[str, float, str, str]]:
    times = step.times_of(position)
    parts = [
        ("sections", times.device_s, ui.BLUE),
        ("host", times.host_s, ui.INK),
        *(
            (f"messages along {axis}", traffic.predicted_s, message_colour(axis))
            for axis, traffic in times.messages.items()
        ),
        ("idle", times.idle_s, ui.HAIRLINE),
        ("update", times.update_s, ui.ORANGE),
        ("sync, and waiting for later ranks", times.exposed_sync_s, ui.GREEN),
    ]
    return [(name, seconds, format_seconds(seconds), colour) for name, seconds, colour in parts]


def _ranks(record: StepRecord) -> ui.Part:
    lead = (
        "The ranks of the first replica; others are alike. Parameters, gradients and states are those of the rank's "
        "stages and parts of tensors, without ZeRO; memory includes tensors between sections. The shares are of its "
        "time in passes: on the device or the host, in messages, and waiting for other stages."
    )
    return ui.Part("ranks", "Ranks", lead, ui.table(ranks_table(record), "fitted"))


def _axes(record: StepRecord) -> ui.Part:
    lead = (
        "Bytes are those that all ranks of a replica receive in a step; over host links, also those that they send. "
        "Rank 0 waits along dp for sync that does not overlap with its backward, and along pp also while it is idle."
    )
    return ui.Part("axes", "Bytes and time by axis", lead, ui.table(axes_table(record), "fitted"))
