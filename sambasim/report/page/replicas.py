"""Predicted parts about data parallel replicas: the timeline of a step, and scaling."""

from collections.abc import Mapping, Sequence
from math import ceil, floor

from sambasim.report.findings import Findings
from sambasim.report.page import ui
from sambasim.simulation.advice import on_a_node
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.scaling import ScaledStep, Track
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_seconds, plain_rate

WAYS: Mapping[SyncPath, str] = {SyncPath.RDU: "sync by RDUs", SyncPath.HOST: "sync by hosts"}
_ROW_PX, _FRAME_PX = 38, 96


def timeline(found: Findings) -> ui.Part:
    prediction = found.prediction
    steps = [prediction.scaled[path][on_a_node(prediction)] for path in SyncPath]
    replicas = steps[0].placement.replicas
    if steps[0].path is None:
        steps = steps[:1]
        title = "The step, one replica"
        lead = "The host runs before the device, without overlap. Drag to zoom, double-click to zoom out."
    else:
        title = f"The step on {replicas} replicas"
        lead = (
            f"One of {replicas} equal replicas ({_where_text(steps[0])}). Transfers of gradients that overlap with "
            "sections cost no time; sections wait for the others. Drag to zoom, double-click to zoom out; a click on a "
            "section shows its operators."
        )
    if any(len(step.spans) > ui.MOST_SPANS for step in steps):
        lead += f" Only the last {ui.MOST_SPANS:,} spans are drawn; earlier micro-steps look the same."
    rows = [_track_name(step, track) for step in steps for track in _busy_tracks(step)]
    height = _ROW_PX * len(rows) + _FRAME_PX
    last_s = max(step.predicted_s for step in steps)
    drawn = ui.figure(
        _timeline_traces(steps),
        barmode="overlay",
        bargap=0.18,
        xaxis=ui.axis("predicted time since the step began", range=[0, last_s * 1.01], **ui.SECONDS),
        yaxis=ui.axis("", categoryorder="array", categoryarray=rows, autorange="reversed", fixedrange=True, ticks=""),
        margin={"l": 148, "r": 16, "t": 34, "b": 48},
        shapes=_divider(len(_busy_tracks(steps[0]))) if len(steps) > 1 else [],
    )
    parts = [
        ui.without_host("timeline-figure", steps[0].step.host_s, last_s),
        ui.plot("timeline-figure", height, f"{title}: when host, sections and links are busy"),
    ]
    if steps[0].path is not None:
        parts.append(_waits_table(steps))
    return ui.Part("timeline", title, lead, ui.joined(*parts), {"timeline-figure": drawn})


def _where_text(step: ScaledStep) -> str:
    placement = step.placement
    if placement.nodes == 1:
        full = placement.replicas == placement.per_full_node
        return f"on one {'full ' if full else ''}node of {placement.cluster.name}"
    return f"on {placement.nodes} nodes of {placement.cluster.name}"


def _busy_tracks(step: ScaledStep) -> list[Track]:
    busy = {span.track for span in step.spans}
    return [track for track in Track if track in busy]


def _track_name(step: ScaledStep, track: Track) -> str:
    return track.value if step.path is None else f"{WAYS[step.path]} · {track.value}"


def _divider(tracks: int) -> list[dict[str, object]]:
    ends = {"x0": -0.14, "x1": 1, "y0": tracks - 0.5, "y1": tracks - 0.5}
    return [{"type": "line", "xref": "paper", **ends, "line": {"color": ui.HAIRLINE, "width": 2}}]


def _timeline_traces(steps: Sequence[ScaledStep]) -> list[ui.Trace]:
    # Of a step with thousands of equal micro-steps, the last spans.
    placed = [
        ui.Bar(
            span.kind,
            _track_name(step, span.track),
            span.start_s,
            span.predicted_s,
            ui.visible(span.name) if span.section is None else span.section,
        )
        for step in steps
        for span in step.spans[-ui.MOST_SPANS :]
    ]
    line, _ = ui.bars(len(placed) // len(steps), gap=0.0)
    by_kind = {kind: [bar for bar in placed if bar.name == kind] for kind in ui.KINDS}
    return [ui.bars_of(kind, ui.KINDS[kind], mine, line) for kind, mine in by_kind.items() if mine]


def _waits_table(steps: Sequence[ScaledStep]) -> ui.Html:
    rows = [
        (
            WAYS[step.path] if step.path else "",
            step.way,
            format_seconds(step.predicted_s),
            format_seconds(step.sync_s),
            ui.seconds_or_none(step.hidden_sync_s),
            ui.seconds_or_none(step.exposed_sync_s),
            f"{step.sync_share:.1%}",
        )
        for step in steps
    ]
    heads = ("way", "how gradients are synced", "step", "sync", "overlapped", "waiting", "share of the step")
    return ui.element("div", ui.table(heads, rows, words=2, class_="waits"), class_="under")


_DASHES = {SyncPath.RDU: "solid", SyncPath.HOST: "dot"}
_SYMBOLS = {SyncPath.RDU: "circle", SyncPath.HOST: "diamond"}


def scaling(found: Findings) -> ui.Part:
    prediction = found.prediction
    steps = prediction.scaled[SyncPath.RDU]
    if prediction.program.training is None:
        note = (
            "This PEF has no training step: replicas exchange nothing, so throughput is proportional to their number."
        )
        return ui.Part("scaling", "Scaling", note, ui.joined())
    placement = steps[0].placement
    each = "one replica an RDU" if placement.per_rdu == 1 else f"{placement.per_rdu} replicas an RDU"
    plots = ui.element(
        "div",
        ui.plot("scaling-speed", 340, "Samples per second over replicas, by way to sync"),
        ui.plot("scaling-efficiency", 340, "Efficiency over replicas, by way to sync"),
        class_="pair",
    )
    return ui.Part(
        id="scaling",
        title="Scaling",
        lead=(
            "Each replica has its own batch, so the global batch grows with the number of replicas. "
            f"{placement.cluster.name} has {each}, {placement.per_full_node} replicas a node. Efficiency is "
            "relative to replicas that share the update and never wait."
        ),
        body=ui.joined(plots, _scaling_table(prediction)),
        figures=_scaling_figures(prediction, [step.placement.replicas for step in steps]),
    )


def _scaling_figures(prediction: Prediction, counts: Sequence[int]) -> Mapping[str, ui.Figure]:
    alone = prediction.alone
    ideal = ui.lines(
        "without sync",
        counts,
        [count * alone.samples_per_s for count in counts],
        line={"color": ui.GREY, "dash": "dash", "width": 1.5},
        hoverinfo="skip",
    )
    speeds = {path: [step.samples_per_s for step in prediction.scaled[path]] for path in SyncPath}
    efficiencies = {path: [step.efficiency for step in prediction.scaled[path]] for path in SyncPath}
    least, most = zoomed([value for values in efficiencies.values() for value in values])
    title = "predicted efficiency" + (f" (from {least:.0%}, not from 0)" if least else "")
    x = ui.axis(
        "replicas", type="log", tickvals=counts, ticktext=list(map(str, counts)), fixedrange=True, automargin=True
    )
    legend = {**ui.LEGEND, "y": 1.02}
    return {
        "scaling-speed": ui.figure(
            [ideal, *(_curve(prediction, path, values) for path, values in speeds.items())],
            xaxis=x,
            yaxis=ui.axis("predicted samples/s", type="log", exponentformat="SI", dtick=1, fixedrange=True),
            legend=legend,
        ),
        "scaling-efficiency": ui.figure(
            [_curve(prediction, path, values) for path, values in efficiencies.items()],
            xaxis=x,
            yaxis=ui.axis(title, range=[least, most], tickformat=".0%", fixedrange=True),
            legend=legend,
        ),
    }


_ZOOM_MARGIN = 0.12
_LEAST_SPAN = 0.05


def zoomed(efficiencies: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis of `efficiencies` and of 100 %, at whole per cents; from 0 if that is near."""
    least, most = min(1.0, *efficiencies), max(1.0, *efficiencies)
    margin = max(_LEAST_SPAN, most - least) * _ZOOM_MARGIN
    start = floor(100 * (least - margin)) / 100
    return (0.0 if start < _NEAR_ZERO else start), ceil(100 * (most + margin)) / 100


_NEAR_ZERO = 0.25


def _curve(prediction: Prediction, path: SyncPath, values: Sequence[float]) -> ui.Trace:
    steps = prediction.scaled[path]
    texts = [
        f"<b>{step.placement.replicas} replicas, {WAYS[path]}</b><br>{plain_rate(step.samples_per_s)} samples/s, "
        f"efficiency {step.efficiency:.1%}<br>step {format_seconds(step.predicted_s)}, of which "
        f"{format_seconds(step.exposed_sync_s)} waiting for sync<br>{step.way or 'nothing to sync'}"
        for step in steps
    ]
    return ui.lines(
        WAYS[path],
        [step.placement.replicas for step in steps],
        values,
        mode="lines+markers",
        hovertext=texts,
        hoverinfo="text",
        line={"color": ui.PATHS[path], "width": 2.5, "dash": _DASHES[path]},
        marker={"size": 7, "symbol": _SYMBOLS[path]},
    )


def _scaling_table(prediction: Prediction) -> str:
    ways = [
        ui.element("th", WAYS[path], colspan=4, class_="way", style=f"border-bottom-color:{ui.PATHS[path]}")
        for path in SyncPath
    ]
    above = ui.element("tr", ui.element("th", "", colspan=2), *ways)
    heads = ["replicas", "nodes", *(["step", "samples/s", "efficiency", "waiting"] * len(SyncPath))]
    rows = []
    for steps in zip(*prediction.scaled.values(), strict=True):
        placement = steps[0].placement
        row = [str(placement.replicas), str(placement.nodes)]
        for step in steps:
            row += [
                format_seconds(step.predicted_s),
                plain_rate(step.samples_per_s),
                f"{step.efficiency:.1%}",
                ui.seconds_or_none(step.exposed_sync_s),
            ]
        rows.append(row)
    return ui.table(heads, rows, words=0, class_="compact", above=above)
