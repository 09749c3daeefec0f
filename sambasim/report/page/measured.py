"""The parts about a run: learning curves, time of the steps, and the summary. Everything is measured."""

import math
from collections.abc import Sequence

from sambasim.records.metrics import RunRecords, SummaryRecord
from sambasim.report.page.parts import (
    BLUE,
    GREEN,
    INK,
    LEGEND,
    ORANGE,
    PURPLE,
    SECONDS,
    VERMILLION,
    Figure,
    Key,
    Part,
    Trace,
    axis,
    bars,
    element,
    figure,
    joined,
    keys,
    plot,
    table,
)
from sambasim.units import format_bytes, format_seconds

_MOST_POINTS = 4000
"""Points of a curve; of longer runs every n-th step is drawn."""


def measured_parts(run: RunRecords, name: str) -> list[Part]:
    """The parts of the run in the file called `name`."""
    parts = [_glance(run, name)]
    if run.steps:
        parts += [_learning(run), _time(run)]
    if run.summary is not None:
        parts.append(_summary(run.summary))
    return parts


def _glance(run: RunRecords, name: str) -> Part:
    summary, steps = run.summary, run.steps
    figures = []
    if steps:
        figures.append(Key("loss", f"{_short(steps[0].loss)} → {_short(steps[-1].loss)}", f"{len(steps)} steps"))
        usual = sorted(step.step_s for step in steps)[len(steps) // 2]
        figures.append(Key("step", format_seconds(usual), "median, data included"))
    if run.evaluations:
        last = run.evaluations[-1]
        if last.accuracy is not None:
            figures.append(Key("accuracy", f"{last.accuracy:.1%}", f"of {last.samples} held-out samples"))
        elif last.loss is not None:
            figures.append(Key("held-out loss", _short(last.loss), f"{last.samples} samples"))
    if summary is not None:
        ranks = "1 replica" if summary.world_size == 1 else f"{summary.world_size} replicas"
        figures += [
            Key("throughput", f"{summary.samples_per_s:,.0f}", f"samples/s, {ranks}"),
            Key("waiting for sync", f"{summary.sync_share:.1%}", "of the training time"),
            Key("training", format_seconds(summary.training_s), f"{summary.steps} steps, {summary.engine} engine"),
        ]
    lead = f"From {name}, measured on the machine that ran it: a computer, not RDUs."
    if summary is None:
        lead += " The run has no summary: it failed, was stopped, or is still running."
    return Part("measured", "The run at a glance", lead, True, keys(figures))


def _learning(run: RunRecords) -> Part:
    norms = [step.grad_norm for step in run.steps]
    has_norms = any(norm is not None for norm in norms)
    plots = [plot("run-loss", 320, "Loss over steps")]
    figures = {"run-loss": _loss(run)}
    if has_norms:
        plots.append(plot("run-norm", 320, "Norm of the gradients over steps"))
        figures["run-norm"] = _over_steps(run, "gradient norm", norms, GREEN)
    plots.append(plot("run-lr", 320 if not has_norms else 220, "Learning rate over steps"))
    figures["run-lr"] = _over_steps(run, "learning rate", [step.lr for step in run.steps], PURPLE)
    lead = "Losses are means over replicas and micro-steps. A gap in a line is a number that was not finite."
    body = element("div", *plots[:2], class_="pair")
    return Part("learning", "Learning", lead, True, joined([body, *plots[2:]]), figures)


def _loss(run: RunRecords) -> Figure:
    traces = [_line(run, "training, each step", [step.loss for step in run.steps], VERMILLION)]
    held_out = [record for record in run.evaluations if record.loss is not None]
    if held_out:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "held-out samples",
                "x": [record.step for record in held_out],
                "y": [_finite(record.loss) for record in held_out],
                "marker": {"color": INK, "symbol": "diamond", "size": 9},
            }
        )
    return figure(traces, xaxis=_steps_axis(), yaxis=axis("measured loss", fixedrange=True), showlegend=True)


def _over_steps(run: RunRecords, name: str, values: Sequence[float | None], colour: str) -> Figure:
    return figure(
        [_line(run, name, values, colour)],
        xaxis=_steps_axis(),
        yaxis=axis(f"measured {name}" if name != "learning rate" else name, fixedrange=True, rangemode="tozero"),
        showlegend=False,
        margin={"l": 80, "r": 16, "t": 30, "b": 44},
    )


def _steps_axis() -> dict[str, object]:
    return axis("optimizer step", rangemode="tozero", tickformat="d")


def _line(run: RunRecords, name: str, values: Sequence[float | None], colour: str) -> Trace:
    every = -(-len(run.steps) // _MOST_POINTS)
    return {
        "type": "scatter",
        "mode": "lines" if len(run.steps) > 1 else "markers",
        "name": name,
        "x": [step.step for step in run.steps][::every],
        "y": [_finite(value) for value in values][::every],
        "line": {"color": colour, "width": 2},
    }


def _time(run: RunRecords) -> Part:
    parts = {
        "sections, data and update": ([step.step_s - step.sync_s for step in run.steps], BLUE),
        "waiting for sync": ([step.sync_s for step in run.steps], VERMILLION),
    }
    every = -(-len(run.steps) // _MOST_POINTS)
    traces: list[Trace] = [
        {
            "type": "bar",
            "name": name,
            "x": [step.step for step in run.steps][::every],
            "y": seconds[::every],
            "marker": {"color": colour, "line": {"width": 0}},
        }
        for name, (seconds, colour) in parts.items()
    ]
    hidden: Trace = {
        "type": "scatter",
        "mode": "lines",
        "name": "sync during the backward",
        "x": [step.step for step in run.steps][::every],
        "y": [step.hidden_sync_s for step in run.steps][::every],
        "line": {"color": ORANGE, "width": 2},
    }
    if any(step.hidden_sync_s for step in run.steps):
        traces.append(hidden)
    drawn = figure(
        traces,
        barmode="stack",
        bargap=bars(len(run.steps[::every]), gap=0.1)[1],
        xaxis=_steps_axis(),
        yaxis=axis("measured", fixedrange=True, **SECONDS),
        legend={**LEGEND, "traceorder": "normal"},
        showlegend=True,
    )
    lead = (
        "The whole step of rank 0, reading data included. Waiting for sync is the time of REDUCE and GATHER after the "
        "backward of rank 0, waiting for slower replicas included. Sync during the backward is hidden, and part of the "
        "lower part of the bar."
    )
    return Part("run-time", "Time of each step", lead, True, plot("run-steps", 320, lead), {"run-steps": drawn})


def _summary(summary: SummaryRecord) -> Part:
    sync = summary.sync if summary.host_sync is None else f"{summary.sync}, by {summary.host_sync}"
    moved = summary.bytes
    rows = [
        ("replicas", f"{summary.world_size}{', emulated' if summary.emulated else ''}"),
        ("sync", sync),
        ("parameter servers", str(summary.parameter_servers) if summary.parameter_servers else ""),
        ("batch", f"{summary.batch_size} a replica, {summary.global_batch_size} in total"),
        ("micro-steps in a step", str(summary.accumulation_steps)),
        ("epochs, steps", f"{summary.epochs}, {summary.steps}"),
        ("samples", f"{summary.samples}; {summary.samples_left_out_each_epoch} left out in each epoch"),
        ("moved, peer to peer", format_bytes(moved.peer)),
        ("moved, device to host", format_bytes(moved.device_to_host)),
        ("moved, host to device", format_bytes(moved.host_to_device)),
        ("moved, over the network", format_bytes(moved.network)),
        ("first step with a loss that is not finite", str(summary.first_nonfinite_step or "")),
        ("skipped steps", str(summary.skipped_steps or "")),
        ("engine, threads, seed", f"{summary.engine}, {summary.threads}, {summary.seed}"),
        ("torch, MPI", f"{summary.torch}, {summary.mpi}"),
        ("exempt from exactness", "; ".join(summary.exempt_from_exactness)),
        ("weights", summary.weights_sha256),
        ("state", summary.state_sha256),
        ("PEF", summary.pef_digest),
    ]
    body = table(("", ""), [row for row in rows if row[1]], words=2, class_="facts")
    return Part("run-summary", "Summary of the run", "The last line of the metrics file.", True, body)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _short(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not finite"
