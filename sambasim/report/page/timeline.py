"""The timeline of a predicted step: of a replica of one rank its sections, of another one the schedule of its ranks."""

from collections.abc import Iterator, Mapping, Sequence

from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, TENSOR
from sambasim.report.analysis import Analysis
from sambasim.report.page import ui
from sambasim.report.tables import text_table
from sambasim.report.trace import kind_of, title_of
from sambasim.simulation.advice import on_a_node
from sambasim.simulation.scaling import Span, SyncedRank, Track
from sambasim.simulation.step import PredictedStep
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_seconds

WAYS: Mapping[SyncPath, str] = {SyncPath.RDU: "sync by RDUs", SyncPath.HOST: "sync by hosts"}
_ROW_PX, _FRAME_PX = 38, 96


def timeline(analysis: Analysis) -> ui.Part:
    prediction = analysis.prediction
    steps = [prediction.steps[path][on_a_node(prediction)].synced for path in SyncPath]
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
    last_s = max(step.predicted_s for step in steps)
    # Of a step with thousands of equal micro-steps, the last spans.
    bars = [_bar(step, span) for step in steps for span in step.spans[-ui.MOST_SPANS :]]
    divider = _divider(len(_busy_tracks(steps[0]))) if len(steps) > 1 else []
    drawn = _figure(bars, rows, last_s, shapes=divider)
    parts = [
        ui.without_host("timeline-figure", steps[0].step.host_s, last_s),
        _plot("timeline-figure", rows, f"{title}: when host, sections and links are busy"),
    ]
    if steps[0].path is not None:
        parts.append(_waits_table(steps))
    return ui.Part("timeline", title, lead, ui.joined(*parts), {"timeline-figure": drawn})


def _where_text(step: SyncedRank) -> str:
    placement = step.placement
    if placement.nodes == 1:
        full = placement.replicas == placement.per_full_node
        return f"on one {'full ' if full else ''}node of {placement.cluster.name}"
    return f"on {placement.nodes} nodes of {placement.cluster.name}"


def _busy_tracks(step: SyncedRank) -> list[Track]:
    busy = {span.track for span in step.spans}
    return [track for track in Track if track in busy]


def _track_name(step: SyncedRank, track: Track) -> str:
    return track.value if step.path is None else f"{WAYS[step.path]} · {track.value}"


def _divider(tracks: int) -> list[dict[str, object]]:
    ends = {"x0": -0.14, "x1": 1, "y0": tracks - 0.5, "y1": tracks - 0.5}
    return [{"type": "line", "xref": "paper", **ends, "line": {"color": ui.HAIRLINE, "width": 2}}]


def _bar(step: SyncedRank, span: Span) -> ui.Bar:
    data = ui.visible(span.name) if span.section is None else span.section
    return ui.Bar(span.kind, _track_name(step, span.track), span.start_s, span.predicted_s, data)


def _waits_table(steps: Sequence[SyncedRank]) -> ui.Html:
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
    numbers = ("step", "sync", "overlapped", "waiting", "share of the step")
    waits = text_table("", ("way", "how gradients are synced"), numbers, rows)
    return ui.element("div", ui.table(waits, "waits"), class_="under")


def ranks_at(step: PredictedStep, position: int) -> str:
    """The ranks of the first replica that have this position along pp."""
    first = step.mesh.group(0, PIPELINE)[position]
    last = first + step.mesh.size(TENSOR) - 1
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def schedule(step: PredictedStep) -> ui.Part:
    positions = range(len(step.ranks))
    syncs = step.path is not None
    rows = [
        row for position in positions for row in (ranks_at(step, position), _sync_label(step, position))[: 1 + syncs]
    ]
    bars = sorted(_bars(step), key=lambda bar: bar.start_s)
    drawn = _figure(bars[-ui.MOST_SPANS :], rows, step.predicted_s, uniformtext={"mode": "hide", "minsize": 9})
    lead = (
        f"{step.schedule.name}: ranks are idle for {step.idle_share:.1%} of their time in passes. "
        if step.program.schedule is not None
        else ""
    ) + (
        "A cell is an action (F forward, B backward, I and W the halves of a backward) and its micro-batch. Its "
        "messages are drawn first; in a step they are between its operators. Ranks that differ along other axes than "
        "pp do the same. Drag to zoom, double-click to zoom out."
    )
    if len(bars) > ui.MOST_SPANS:
        lead += f" Only the last {ui.MOST_SPANS:,} spans are drawn."
    body = _plot("schedule-figure", rows, "When ranks compute, send and update")
    return ui.Part("schedule", f"The schedule on {step.mesh}", lead, body, {"schedule-figure": drawn})


def _sync_label(step: PredictedStep, position: int) -> str:
    return f"{ranks_at(step, position)} · sync"


def _bars(step: PredictedStep) -> Iterator[ui.Bar]:
    several = step.schedule.stages > step.schedule.ranks
    for position, row in enumerate(step.passes.timeline):
        name = ranks_at(step, position)
        for began_s in (number * step.passes.predicted_s for number in range(step.micro_steps)):
            for action, start_s, stop_s in row:
                at_s = began_s + start_s
                for axis, traffic in step.passes.cost(action).messages.items():
                    yield ui.Bar(f"messages along {axis}", name, at_s, traffic.predicted_s, title_of(action))
                    at_s += traffic.predicted_s
                text = str(action) if several else f"{action.kind}{action.micro_batch}"
                yield ui.Bar(kind_of(action), name, at_s, began_s + stop_s - at_s, title_of(action), text)
        for span in step.ranks[position].spans_after(step.passes_s):
            where = _sync_label(step, position) if span.track is Track.LINKS else name
            yield ui.Bar(span.kind, where, span.start_s, span.predicted_s, ui.visible(span.name))


def message_colour(axis: str) -> str:
    return ui.VERMILLION if axis == PIPELINE else ui.GREY


_COLOURS: Mapping[str, str] = {
    **ui.KINDS,
    "forward": ui.SKY,
    "backward": ui.BLUE,
    "input gradients": ui.BLUE,
    "weight gradients": ui.DEEP,
    **{f"messages along {axis}": message_colour(axis) for axis in (PIPELINE, TENSOR, DATA_PARALLEL)},
}


def _figure(bars: Sequence[ui.Bar], rows: Sequence[str], last_s: float, **layout: object) -> ui.Figure:
    line, _ = ui.bars(len(bars) // len(rows), gap=0.0)
    by_name = {name: [bar for bar in bars if bar.name == name] for name in _COLOURS}
    return ui.figure(
        [ui.bars_of(name, _COLOURS[name], mine, line) for name, mine in by_name.items() if mine],
        barmode="overlay",
        bargap=0.18,
        xaxis=ui.axis("predicted time since the step began", range=[0, last_s * 1.01], **ui.SECONDS),
        yaxis=ui.axis("", categoryorder="array", categoryarray=rows, autorange="reversed", fixedrange=True, ticks=""),
        margin={"l": 148, "r": 16, "t": 34, "b": 48},
        **layout,
    )


def _plot(id_: str, rows: Sequence[str], label: str) -> ui.Html:
    return ui.plot(id_, _ROW_PX * len(rows) + _FRAME_PX, label)
