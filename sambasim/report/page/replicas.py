"""Predicted parts about data parallel replicas: the timeline of a step, and scaling."""

from collections.abc import Mapping, Sequence

from sambasim.report.page.overview import shown
from sambasim.report.page.parts import (
    GREY,
    HAIRLINE,
    KINDS,
    LEGEND,
    PATHS,
    SECONDS,
    Figure,
    Hover,
    Html,
    Part,
    Trace,
    axis,
    bars,
    element,
    figure,
    joined,
    plot,
    seconds_or_none,
    table,
    visible,
)
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.scaling import ScaledStep
from sambasim.simulation.sync import SyncPath
from sambasim.simulation.timeline import Span, Track
from sambasim.units import format_seconds, plain_rate

WAYS: Mapping[SyncPath, str] = {SyncPath.RDU: "sync by RDUs", SyncPath.HOST: "sync by hosts"}
_ROW_PX, _FRAME_PX = 38, 96
_MOST_SPANS = 5000
"""Spans of a step that are drawn; a page with more is slow to open."""


def timeline(prediction: Prediction) -> Part:
    """The tracks of one replica with sync by RDUs, and below with sync by hosts, on a common time axis."""
    steps = [prediction.scaled[path][shown(prediction)] for path in SyncPath]
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
    if any(len(step.spans) > _MOST_SPANS for step in steps):
        lead += f" Only the last {_MOST_SPANS:,} spans are drawn; earlier micro-steps look the same."
    rows = [_track_name(step, track) for step in steps for track in _busy_tracks(step)]
    height = _ROW_PX * len(rows) + _FRAME_PX
    last_s = max(step.predicted_s for step in steps)
    drawn = figure(
        _timeline_traces(steps),
        barmode="overlay",
        bargap=0.18,
        xaxis=axis("predicted time since the step began", range=[0, last_s * 1.01], **SECONDS),
        yaxis=axis("", categoryorder="array", categoryarray=rows, autorange="reversed", fixedrange=True, ticks=""),
        margin={"l": 148, "r": 16, "t": 34, "b": 48},
        shapes=_divider(len(_busy_tracks(steps[0]))) if len(steps) > 1 else [],
    )
    parts = [plot("timeline-figure", height, f"{title}: when host, sections and links are busy")]
    if steps[0].path is not None:
        parts.append(_waits_table(steps))
    return Part("timeline", title, lead, False, joined(parts), {"timeline-figure": drawn})


def _drawn_spans(step: ScaledStep) -> Sequence[Span]:
    """The spans to draw: the last ones of a step with thousands of equal micro-steps."""
    return step.spans if len(step.spans) <= _MOST_SPANS else step.spans[-_MOST_SPANS:]


def _where_text(step: ScaledStep) -> str:
    placement = step.placement
    if placement.nodes == 1:
        full = placement.replicas == placement.per_full_node
        return f"{'one full node' if full else 'in one node'} of {placement.cluster.name}"
    return f"on {placement.nodes} nodes of {placement.cluster.name}"


def _busy_tracks(step: ScaledStep) -> list[Track]:
    busy = {span.track for span in step.spans}
    return [track for track in Track if track in busy]


def _track_name(step: ScaledStep, track: Track) -> str:
    return track.value if step.path is None else f"{WAYS[step.path]} · {track.value}"


def _divider(tracks: int) -> list[dict[str, object]]:
    """A line between the two ways to sync."""
    y = tracks - 0.5
    return [
        {
            "type": "line",
            "xref": "paper",
            "x0": -0.14,
            "x1": 1,
            "y0": y,
            "y1": y,
            "line": {"color": HAIRLINE, "width": 2},
        }
    ]


def _timeline_traces(steps: Sequence[ScaledStep]) -> list[Trace]:
    """One trace for each kind of section, so that the legend can hide it."""
    placed = [(step, span) for step in steps for span in _drawn_spans(step)]
    line, _ = bars(len(placed) // len(steps), gap=0.0)
    traces: list[Trace] = []
    for kind, colour in KINDS.items():
        mine = [(step, span) for step, span in placed if span.kind == kind]
        if not mine:
            continue
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": kind,
                "y": [_track_name(step, span.track) for step, span in mine],
                "base": [span.start_s for _, span in mine],
                "x": [span.predicted_s for _, span in mine],
                "customdata": [visible(span.name) if span.section is None else span.section for _, span in mine],
                "meta": Hover.SPANS,
                "marker": {"color": colour, "line": line},
            }
        )
    return traces


def _waits_table(steps: Sequence[ScaledStep]) -> Html:
    rows = [
        (
            WAYS[step.path] if step.path else "",
            step.way,
            format_seconds(step.predicted_s),
            format_seconds(step.sync_s),
            seconds_or_none(step.hidden_sync_s),
            seconds_or_none(step.exposed_sync_s),
            f"{step.sync_share:.1%}",
        )
        for step in steps
    ]
    heads = ("way", "how gradients are synced", "step", "sync", "overlapped", "waiting", "share of the step")
    return element("div", table(heads, rows, words=2, class_="waits"), class_="under")


_DASHES = {SyncPath.RDU: "solid", SyncPath.HOST: "dot"}
_SYMBOLS = {SyncPath.RDU: "circle", SyncPath.HOST: "diamond"}


def scaling(prediction: Prediction) -> Part:
    """Curves, and a table row for each number of replicas."""
    steps = prediction.scaled[SyncPath.RDU]
    if prediction.program.training is None:
        note = (
            "This PEF has no training step: replicas exchange nothing, so throughput is proportional to their number."
        )
        return Part("scaling", "Scaling", note, False, joined([]))
    counts = [step.placement.replicas for step in steps]
    return Part(
        id="scaling",
        title="Scaling",
        lead=(
            "Each replica has its own batch, so the global batch grows with the number of replicas. "
            f"{_replicas_per_rdu(steps[0])} An efficiency of 100 % is that of one replica. With sync by RDUs it can be "
            "higher, because each replica then updates only its slice of the parameters."
        ),
        measured=False,
        body=joined(
            [
                element(
                    "div",
                    plot("scaling-speed", 340, "Samples per second over replicas, by way to sync"),
                    plot("scaling-efficiency", 340, "Efficiency over replicas, by way to sync"),
                    class_="pair",
                ),
                _scaling_table(prediction),
            ]
        ),
        figures={
            "scaling-speed": _speed_figure(prediction, counts),
            "scaling-efficiency": _efficiency_figure(prediction, counts),
        },
    )


def _replicas_per_rdu(step: ScaledStep) -> str:
    placement = step.placement
    each = "one replica an RDU" if placement.per_rdu == 1 else f"{placement.per_rdu} replicas an RDU"
    return f"{placement.cluster.name} has {each}, {placement.per_full_node} replicas a node."


def _counts_axis(counts: Sequence[int]) -> dict[str, object]:
    return axis("replicas", type="log", tickvals=counts, ticktext=list(map(str, counts)), fixedrange=True)


def _speed_figure(prediction: Prediction, counts: Sequence[int]) -> Figure:
    alone = prediction.alone
    ideal: Trace = {
        "type": "scatter",
        "mode": "lines",
        "name": "without sync",
        "x": counts,
        "y": [count * alone.samples_per_s for count in counts],
        "line": {"color": GREY, "dash": "dash", "width": 1.5},
        "hoverinfo": "skip",
    }
    curves = [_curve(prediction, path, [step.samples_per_s for step in prediction.scaled[path]]) for path in SyncPath]
    return figure(
        [ideal, *curves],
        xaxis=_counts_axis(counts),
        yaxis=axis("predicted samples/s", type="log", exponentformat="SI", dtick=1, fixedrange=True),
        legend={**LEGEND, "y": 1.02},
    )


def _efficiency_figure(prediction: Prediction, counts: Sequence[int]) -> Figure:
    efficiencies = {path: [step.efficiency(prediction.alone) for step in prediction.scaled[path]] for path in SyncPath}
    top = 1.05 * max(1.0, *(value for values in efficiencies.values() for value in values))
    return figure(
        [_curve(prediction, path, values) for path, values in efficiencies.items()],
        xaxis=_counts_axis(counts),
        yaxis=axis("predicted efficiency", range=[0, top], tickformat=".0%", fixedrange=True),
        legend={**LEGEND, "y": 1.02},
    )


def _curve(prediction: Prediction, path: SyncPath, values: Sequence[float]) -> Trace:
    steps = prediction.scaled[path]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": WAYS[path],
        "x": [step.placement.replicas for step in steps],
        "y": values,
        "hovertext": [
            f"<b>{step.placement.replicas} replicas, {WAYS[path]}</b><br>{plain_rate(step.samples_per_s)} samples/s, "
            f"efficiency {step.efficiency(prediction.alone):.1%}<br>step {format_seconds(step.predicted_s)}, of which "
            f"{format_seconds(step.exposed_sync_s)} waiting for sync<br>{step.way or 'nothing to sync'}"
            for step in steps
        ],
        "hoverinfo": "text",
        "line": {"color": PATHS[path], "width": 2.5, "dash": _DASHES[path]},
        "marker": {"size": 7, "symbol": _SYMBOLS[path]},
    }


def _scaling_table(prediction: Prediction) -> str:
    ways = [
        element("th", WAYS[path], colspan=4, class_="way", style=f"border-bottom-color:{PATHS[path]}")
        for path in SyncPath
    ]
    above = element("tr", element("th", "", colspan=2), *ways)
    heads = ["replicas", "nodes", *(["step", "samples/s", "efficiency", "waiting"] * len(SyncPath))]
    rows = []
    for steps in zip(*prediction.scaled.values(), strict=True):
        placement = steps[0].placement
        row = [str(placement.replicas), str(placement.nodes)]
        for step in steps:
            row += [
                format_seconds(step.predicted_s),
                plain_rate(step.samples_per_s),
                f"{step.efficiency(prediction.alone):.1%}",
                seconds_or_none(step.exposed_sync_s),
            ]
        rows.append(row)
    return table(heads, rows, words=0, class_="compact", above=above)
