"""Measured parts: a run as its metrics file records it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from sambasim.ir.mesh import Mesh
from sambasim.records.metrics import RunRecords, SummaryRecord
from sambasim.report.page import ui
from sambasim.report.page.timeline import message_colour
from sambasim.report.summaries import mean_step
from sambasim.report.tables import text_table
from sambasim.units import counted, format_bytes, format_seconds

_MOST_STEPS = 4000  # of longer runs, every n-th step is drawn


def measured_parts(run: RunRecords, name: str, *, beside: bool = False) -> Iterator[ui.Part]:
    """`beside`: with the predictions of the run in a column of their own."""
    parts = [_glance(run, name)]
    if run.steps:
        every_nth = -(-len(run.steps) // _MOST_STEPS)
        drawn = run._replace(steps=run.steps[::every_nth])
        parts += [_learning(drawn), _time(drawn)]
    if run.summary is not None:
        parts += [_mean_step(run.summary, beside=beside), _run_summary(run.summary)]
    return (replace(part, kind="measured") for part in parts)


def mesh_facts(summary: SummaryRecord) -> list[tuple[str, str]]:
    return [("mesh", str(Mesh(summary.mesh)))] if prod(summary.mesh.values()) > summary.world_size else []


def _glance(run: RunRecords, name: str) -> ui.Part:
    summary, steps = run.summary, run.steps
    figures = []
    if steps:
        median_s = sorted(step.step_s for step in steps)[len(steps) // 2]
        figures.append(("loss", f"{_short(steps[0].loss)} → {_short(steps[-1].loss)}", f"{len(steps)} steps"))
        figures.append(("step", format_seconds(median_s), "median, data included"))
    if run.evaluations:
        last = run.evaluations[-1]
        if last.accuracy is not None:
            figures.append(("accuracy", f"{last.accuracy:.1%}", f"of {last.samples} held-out samples"))
        elif last.loss is not None:
            figures.append(("held-out loss", _short(last.loss), f"{last.samples} samples"))
        figures += [(name, _short(number), "of the last evaluation") for name, number in last.metrics.items()]
    lead = f"From {name}, measured on the machine that ran it: a computer, not RDUs."
    if summary is None:
        lead += " The run has no summary: it failed, was stopped, or is still running."
    else:
        figures += [
            ("throughput", f"{summary.samples_per_s:,.0f}", f"samples/s, {counted(summary.world_size, 'replica')}"),
            ("waiting for sync", f"{summary.sync_share:.1%}", "of the training time"),
            ("training", format_seconds(summary.training_s), f"{summary.steps_here} steps, {summary.engine} engine"),
        ]
    return ui.Part("measured", "The run at a glance", lead, ui.keys(figures))


def _short(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "not finite"


def _learning(run: RunRecords) -> ui.Part:
    norms = [step.grad_norm for step in run.steps]
    has_norms = any(norm is not None for norm in norms)
    plots = [ui.plot("run-loss", 320, "Loss over steps")]
    figures = {"run-loss": _loss(run)}
    if has_norms:
        plots.append(ui.plot("run-norm", 320, "Norm of the gradients over steps"))
        figures["run-norm"] = _over_steps(run, "measured gradient norm", norms, ui.GREEN)
    plots.append(ui.plot("run-lr", 220 if has_norms else 320, "Learning rate over steps"))
    figures["run-lr"] = _over_steps(run, "learning rate", [step.lr for step in run.steps], ui.PURPLE)
    lead = "Losses are means over replicas and micro-steps. A gap in a line is a number that was not finite."
    return ui.Part("learning", "Learning", lead, ui.joined(ui.pair(*plots[:2]), *plots[2:]), figures)


def _loss(run: RunRecords) -> ui.Figure:
    traces = [_line(run, "training, each step", [step.loss for step in run.steps], ui.VERMILLION)]
    held_out = [record for record in run.evaluations if record.loss is not None]
    if held_out:
        x, y = [record.step for record in held_out], [record.loss for record in held_out]
        marker = {"color": ui.INK, "symbol": "diamond", "size": 9}
        traces.append(ui.lines("held-out samples", x, y, mode="markers", marker=marker))
    return ui.figure(traces, xaxis=_steps_axis(), yaxis=ui.axis("measured loss", fixedrange=True), showlegend=True)


def _over_steps(run: RunRecords, title: str, values: Sequence[float | None], colour: str) -> ui.Figure:
    line = _line(run, title.removeprefix("measured "), values, colour)
    axes = {"xaxis": _steps_axis(), "yaxis": ui.axis(title, fixedrange=True, rangemode="tozero")}
    return ui.figure([line], **axes, showlegend=False, margin={"l": 80, "r": 16, "t": 30, "b": 44})


def _steps_axis() -> dict[str, object]:
    return ui.axis("optimizer step", rangemode="tozero", tickformat="d")


def _line(run: RunRecords, name: str, values: Sequence[float | None], colour: str) -> ui.Trace:
    mode = "lines" if len(run.steps) > 1 else "markers"
    return ui.lines(name, [step.step for step in run.steps], values, mode=mode, line={"color": colour, "width": 2})


def _mean_step(summary: SummaryRecord, *, beside: bool) -> ui.Part:
    predicts = beside and summary.predicted is not None
    lead = f"Of rank 0, of {counted(summary.steps_here, 'step')}; waiting along an axis is the time in messages."
    if predicts:
        lead += " The predicted column is for devices; it was made by the run, for its ranks and its sync."
    table, notes = mean_step(summary, predicts=predicts)
    body = ui.joined(ui.table(table, "fitted"), *(ui.element("p", note) for note in notes))
    return ui.Part("run-mean", "The mean step", lead, body)


def _time(run: RunRecords) -> ui.Part:
    steps, axes = run.steps, dict.fromkeys(axis for step in run.steps for axis in step.waited_s)
    x = [step.step for step in steps]
    own_s = [step.step_s - step.sync_s - sum(step.waited_s.values()) for step in steps]
    parts = [("sections, data and update", own_s, ui.BLUE)]
    for axis in axes:
        waited_s = [step.waited_s.get(axis, 0.0) for step in steps]
        parts.append((f"waiting along {axis}", waited_s, message_colour(axis)))
    parts.append(("waiting for sync", [step.sync_s for step in steps], ui.GREEN if axes else ui.VERMILLION))
    traces: list[ui.Trace] = [
        {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": colour, "line": {"width": 0}}}
        for name, y, colour in parts
    ]
    if any(step.hidden_sync_s for step in steps):
        hidden_s, line = [step.hidden_sync_s for step in steps], {"color": ui.ORANGE, "width": 2}
        traces.append(ui.lines("sync during the backward", x, hidden_s, line=line))
    axes_of = {"xaxis": _steps_axis(), "yaxis": ui.axis("measured", fixedrange=True, **ui.SECONDS)}
    legend, bargap = {**ui.LEGEND, "traceorder": "normal"}, ui.outline_and_gap(len(x), gap=0.1)[1]
    drawn = ui.figure(traces, barmode="stack", bargap=bargap, **axes_of, legend=legend, showlegend=True)
    lead = (
        "The whole step of rank 0, reading data included. Waiting for sync is the time of REDUCE and GATHER after the "
        "backward of rank 0, waiting for slower replicas included. Sync during the backward is hidden, and part of the "
        "lower part of the bar."
    )
    return ui.Part("run-time", "Time of each step", lead, ui.plot("run-steps", 320, lead), {"run-steps": drawn})


def _run_summary(summary: SummaryRecord) -> ui.Part:
    ways = {"peer": "peer to peer", "device_to_host": "device to host", "host_to_device": "host to device"}
    ways["network"] = "over the network"
    rows = [
        ("replicas", f"{summary.world_size}{', emulated' if summary.emulated else ''}"),
        *mesh_facts(summary),
        ("sync", summary.sync if summary.host_sync is None else f"{summary.sync}, by {summary.host_sync}"),
        ("gradients are rounded to", summary.wire or ""),
        ("parameter servers", str(summary.parameter_servers or "")),
        ("batch", f"{summary.batch_size} a replica, {summary.global_batch_size} in total"),
        ("micro-steps in a step", str(summary.accumulation_steps)),
        ("epochs, steps", f"{summary.epochs}, {summary.steps}"),
        ("samples", f"{summary.samples}; {summary.samples_left_out_each_epoch} left out in each epoch"),
        *((f"moved, {words}", format_bytes(getattr(summary.bytes, way))) for way, words in ways.items()),
        ("first step with a loss that is not finite", str(summary.first_nonfinite_step or "")),
        ("skipped steps", str(summary.skipped_steps or "")),
        ("peak memory of each process", ", ".join(map(format_bytes, summary.peak_memory_bytes))),
        ("ended early", summary.stopped_early or ""),
        ("engine, threads, seed", f"{summary.engine}, {summary.threads}, {summary.seed}"),
        ("torch, MPI", f"{summary.torch}, {summary.mpi}"),
        ("exempt from exactness", "; ".join(summary.exempt_from_exactness)),
        ("weights", summary.weights_sha256),
        ("state", summary.state_sha256),
        ("PEF", summary.pef_digest),
    ]
    body = ui.table(text_table("", ("", ""), (), [row for row in rows if row[1]]), "facts")
    return ui.Part("run-summary", "Summary of the run", "The last line of the metrics file.", body)
