"""When what happens in a predicted step of many replicas, by either way to sync."""

from collections.abc import Mapping, Sequence

from sambasim.report.page.facts import shown
from sambasim.report.page.figure import SECONDS, Hover, Trace, axis, bars, figure
from sambasim.report.page.html import Html, element, joined, visible
from sambasim.report.page.palette import HAIRLINE, KINDS
from sambasim.report.page.part import Part, plot, seconds_or_none, table
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.scaling import ScaledStep
from sambasim.simulation.sync import SyncPath
from sambasim.simulation.timeline import Span, Track
from sambasim.units import format_seconds

WAYS: Mapping[SyncPath, str] = {SyncPath.RDU: "RDUs sync", SyncPath.HOST: "hosts sync"}
_ROW_PX, _FRAME_PX = 38, 96
_MOST_SPANS = 5000
"""Of a step that are drawn: a page of more is slow to open."""


def timeline(prediction: Prediction) -> Part:
    """The tracks of one replica: sync on the RDUs, and below it sync through the host, on one clock."""
    steps = [prediction.scaled[path][shown(prediction)] for path in SyncPath]
    replicas = steps[0].placement.replicas
    if steps[0].path is None:
        steps = steps[:1]
        title = "The step, one replica"
        lead = "The host works first, and does not overlap with the device. Drag to zoom, double-click to zoom out."
    else:
        title = f"The step on {replicas} replicas"
        lead = (
            f"What one of {replicas} replicas does ({_where(steps[0])}); the others do the same. Gradients that travel "
            "while sections run cost nothing; sections wait for the rest. Drag to zoom, double-click to zoom out; a "
            "click on a section shows what is in it."
        )
    if any(len(step.spans) > _MOST_SPANS for step in steps):
        lead += f" Drawn are the last {_MOST_SPANS:,} things that happen; the micro-steps before are like those."
    rows = [_row(step, track) for step in steps for track in _tracks(step)]
    height = _ROW_PX * len(rows) + _FRAME_PX
    last_s = max(step.predicted_s for step in steps)
    drawn = figure(
        _traces(steps),
        barmode="overlay",
        bargap=0.18,
        xaxis=axis("predicted time since the step began", range=[0, last_s * 1.01], **SECONDS),
        yaxis=axis("", categoryorder="array", categoryarray=rows, autorange="reversed", fixedrange=True, ticks=""),
        margin={"l": 148, "r": 16, "t": 34, "b": 48},
        shapes=_rule(len(_tracks(steps[0]))) if len(steps) > 1 else [],
    )
    parts = [plot("timeline-figure", height, f"{title}: when host, sections and links are busy")]
    if steps[0].path is not None:
        parts.append(_waits(steps))
    return Part("timeline", title, lead, False, joined(parts), {"timeline-figure": drawn})


def _drawn(step: ScaledStep) -> Sequence[Span]:
    """What there is room for: of a step with thousands of micro-steps, which are all alike, the last ones."""
    return step.spans if len(step.spans) <= _MOST_SPANS else step.spans[-_MOST_SPANS:]


def _where(step: ScaledStep) -> str:
    placement = step.placement
    if placement.nodes == 1:
        full = placement.replicas == placement.per_full_node
        return f"{'one full node' if full else 'in one node'} of {placement.cluster.name}"
    return f"on {placement.nodes} nodes of {placement.cluster.name}"


def _tracks(step: ScaledStep) -> list[Track]:
    busy = {span.track for span in step.spans}
    return [track for track in Track if track in busy]


def _row(step: ScaledStep, track: Track) -> str:
    return track.value if step.path is None else f"{WAYS[step.path]} · {track.value}"


def _rule(tracks: int) -> list[dict[str, object]]:
    """Between the two ways."""
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


def _traces(steps: Sequence[ScaledStep]) -> list[Trace]:
    """One a kind, so that the legend tells kinds and hides them."""
    placed = [(step, span) for step in steps for span in _drawn(step)]
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
                "y": [_row(step, span.track) for step, span in mine],
                "base": [span.start_s for _, span in mine],
                "x": [span.predicted_s for _, span in mine],
                "customdata": [visible(span.name) if span.section is None else span.section for _, span in mine],
                "meta": Hover.SPANS,
                "marker": {"color": colour, "line": line},
            }
        )
    return traces


def _waits(steps: Sequence[ScaledStep]) -> Html:
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
    heads = ("way", "how gradients travel", "step", "sync", "of it hidden", "waited for", "share of the step")
    return element("div", table(heads, rows, words=2, class_="waits"), class_="under")
