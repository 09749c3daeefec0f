"""The predicted parts about when what runs: of a replica of one rank the timeline of its sections; of a replica of
several, their schedule, and what each of them holds and waits for."""

from collections.abc import Iterator, Mapping, Sequence

from sambasim.errors import printable
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE, TENSOR
from sambasim.report.analysis import Analysis
from sambasim.report.formats import kind_of, title_of
from sambasim.report.page import ui
from sambasim.report.simulation import axes_table, ranks_table, step_record
from sambasim.report.tables import Row, text_table
from sambasim.simulation.prediction import PRICED_IN, Prediction
from sambasim.simulation.scaling import SyncedRank, Track
from sambasim.simulation.step import PredictedStep
from sambasim.simulation.sync import SyncPath
from sambasim.units import counted, format_bytes, format_seconds, plain_rate

WAYS: Mapping[SyncPath, str] = {SyncPath.RDU: "sync by RDUs", SyncPath.HOST: "sync by hosts"}


def timeline(analysis: Analysis) -> ui.Part:
    prediction = analysis.prediction
    steps = [prediction.on_a_node(path).synced for path in SyncPath]
    placement = prediction.on_a_node(SyncPath.RDU).placement
    if steps[0].path is None:
        steps = steps[:1]
        title = "The step, one replica"
        lead = "The host runs before the device, without overlap. Drag to zoom, double-click to zoom out."
    else:
        title = f"The step on {placement.replicas} replicas"
        nodes = f"{placement.nodes} nodes"
        if placement.nodes == 1:
            nodes = f"one {'full ' if placement.replicas == placement.per_full_node else ''}node"
        lead = (
            f"One of {placement.replicas} equal replicas (on {nodes} of {placement.cluster.name}). Transfers of "
            "gradients that overlap with sections cost no time; sections wait for the others. Drag to zoom, "
            "double-click to zoom out; a click on a section shows its operators."
        )
    if any(len(step.spans) > ui.MOST_SPANS for step in steps):
        lead += f" Only the last {ui.MOST_SPANS:,} spans are drawn; earlier micro-steps look the same."

    def row(step: SyncedRank, track: Track) -> str:
        return track.value if step.path is None else f"{WAYS[step.path]} · {track.value}"

    tracks = [[track for track in Track if any(span.track is track for span in step.spans)] for step in steps]
    rows = [row(step, track) for step, busy in zip(steps, tracks, strict=True) for track in busy]
    bars = []
    for step in steps:
        for span in step.spans[-ui.MOST_SPANS :]:
            data = printable(span.name) if span.section is None else span.section
            bars.append(ui.Bar(span.kind, row(step, span.track), span.start_s, span.predicted_s, data))
    end = len(tracks[0]) - 0.5
    between = {"type": "line", "xref": "paper", "x0": -0.14, "x1": 1, "y0": end, "y1": end}
    divider = [{**between, "line": {"color": ui.HAIRLINE, "width": 2}}] if len(steps) > 1 else []
    last_s = max(step.predicted_s for step in steps)
    body = [
        ui.without_host("timeline-figure", steps[0].step.host_s, last_s),
        _plot("timeline-figure", rows, f"{title}: when host, sections and links are busy"),
    ]
    if steps[0].path is not None:
        body.append(_waits_table(steps))
    return ui.Part(
        "timeline", title, lead, ui.joined(*body), {"timeline-figure": _figure(bars, rows, last_s, shapes=divider)}
    )


def _waits_table(steps: Sequence[SyncedRank]) -> ui.Html:
    rows = []
    for step in steps:
        times = map(format_seconds, (step.predicted_s, step.sync_s))
        parts = map(ui.seconds_or_none, (step.hidden_sync_s, step.exposed_sync_s))
        rows.append((WAYS[step.path] if step.path else "", step.way, *times, *parts, f"{step.sync_share:.1%}"))
    numbers = ("step", "sync", "overlapped", "waiting", "share of the step")
    waits = text_table("", ("way", "how gradients are synced"), numbers, rows)
    return ui.element("div", ui.table(waits, "waits"), class_="under")


def parts_of_ranks(prediction: Prediction) -> list[ui.Part]:
    """Of a replica of several ranks."""
    step = prediction.on_a_node(SyncPath.RDU)
    record = step_record(step)
    ranks = (
        "The ranks of the first replica; others are alike. Memory is that of the rank's stages and parts of tensors, "
        "with ZeRO; activations are tensors between sections. The shares are of its time in passes: on the device or "
        "the host, in messages, and waiting for other stages."
    )
    axes = (
        "Bytes are those that all ranks of a replica receive in a step; over host links, also those that they send. "
        "Rank 0 waits along dp for sync that does not overlap with its backward, and along pp also while it is idle."
    )
    of_ranks = ui.Part("ranks", "Ranks", ranks, ui.table(ranks_table(step), "fitted"))
    of_axes = ui.Part("axes", "Bytes and time by axis", axes, ui.table(axes_table(record), "fitted"))
    return [_summary(step, record), _schedule(step), of_ranks, of_axes]


def _summary(step: PredictedStep, record: Row) -> ui.Part:
    most = max(record.each_rank, key=lambda rank: rank.memory_bytes)
    capacity, replicas = format_bytes(step.alone.budget.capacity_bytes), counted(step.replicas, "replica")
    figures = [
        ("step", format_seconds(step.predicted_s), f"{record.ranks} ranks: {step.mesh}"),
        ("throughput", plain_rate(step.samples_per_s), f"samples/s, by {replicas}"),
        ("idle", f"{step.idle_share:.1%}", "of the ranks' time in passes"),
        ("memory", format_bytes(most.memory_bytes), f"of {capacity}, the most: rank {most.rank}"),
    ]
    if step.path is not None:
        hidden = f"{format_seconds(step.synced.hidden_sync_s)} more overlap with passes"
        figures.append(("sync waits", format_seconds(step.first.exposed_sync_s), hidden))
    bars = [
        ui.shares(f"{format_seconds(step.predicted_s)} of {_ranks_at(step, position)}", _parts_of_step(step, position))
        for position in sorted({0, len(step.ranks) - 1})
    ]
    lead = (
        f"Numbers are of a step on {step.mesh}, {PRICED_IN}. The bars divide the time of the first and the last "
        "stage's ranks."
    )
    return ui.Part("summary", "The step at a glance", lead, ui.joined(ui.keys(figures), ui.pair(*bars)))


def _parts_of_step(step: PredictedStep, position: int) -> list[tuple[str, float, str]]:
    times = step.times_of(position)
    return [
        *(("sections", times.device_s, ui.BLUE), ("host", times.host_s, ui.INK)),
        *((f"messages along {name}", each.predicted_s, message_colour(name)) for name, each in times.messages.items()),
        *(("idle", times.idle_s, ui.HAIRLINE), ("update", times.update_s, ui.ORANGE)),
        ("sync, and waiting for later ranks", times.exposed_sync_s, ui.GREEN),
    ]


def _ranks_at(step: PredictedStep, position: int) -> str:
    first = step.mesh.group(0, PIPELINE)[position]
    last = first + step.mesh.size(TENSOR) - 1
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _schedule(step: PredictedStep) -> ui.Part:
    rows = []
    for position in range(len(step.ranks)):
        rows += [_ranks_at(step, position), f"{_ranks_at(step, position)} · sync"][: 1 + (step.path is not None)]
    bars = sorted(_bars(step), key=lambda bar: bar.start_s)
    drawn = _figure(bars[-ui.MOST_SPANS :], rows, step.predicted_s, uniformtext={"mode": "hide", "minsize": 9})
    lead = (
        "A cell is an action (F forward, B backward, I and W the halves of a backward) and its micro-batch. Its "
        "messages are drawn first; in a step they are between its operators. Ranks that differ along other axes than "
        "pp do the same. Drag to zoom, double-click to zoom out."
    )
    if step.program.schedule is not None:
        lead = f"{step.schedule.name}: ranks are idle for {step.idle_share:.1%} of their time in passes. {lead}"
    if len(bars) > ui.MOST_SPANS:
        lead += f" Only the last {ui.MOST_SPANS:,} spans are drawn."
    body = _plot("schedule-figure", rows, "When ranks compute, send and update")
    return ui.Part("schedule", f"The schedule on {step.mesh}", lead, body, {"schedule-figure": drawn})


def _bars(step: PredictedStep) -> Iterator[ui.Bar]:
    several = step.schedule.stages > step.schedule.ranks
    for position, row in enumerate(step.passes.timeline):
        name = _ranks_at(step, position)
        for began_s in (number * step.passes.predicted_s for number in range(step.micro_steps)):
            for action, start_s, stop_s in row:
                at_s = began_s + start_s
                for axis, traffic in step.passes.cost(action).messages.items():
                    yield ui.Bar(f"messages along {axis}", name, at_s, traffic.predicted_s, title_of(action))
                    at_s += traffic.predicted_s
                text = str(action) if several else f"{action.kind}{action.micro_batch}"
                yield ui.Bar(kind_of(action), name, at_s, began_s + stop_s - at_s, title_of(action), text)
        for span in step.ranks[position].spans_after(step.passes_s):
            where = f"{name} · sync" if span.track is Track.LINKS else name
            yield ui.Bar(span.kind, where, span.start_s, span.predicted_s, printable(span.name))


def message_colour(axis: str) -> str:
    return ui.VERMILLION if axis == PIPELINE else ui.GREY


_COLOURS: Mapping[str, str] = {
    **ui.KINDS, "forward": ui.SKY, "backward": ui.BLUE, "input gradients": ui.BLUE, "weight gradients": ui.DEEP,
    **{f"messages along {axis}": message_colour(axis) for axis in (PIPELINE, TENSOR, DATA_PARALLEL)},
}  # fmt: skip


def _figure(bars: Sequence[ui.Bar], rows: Sequence[str], last_s: float, **layout: object) -> ui.Figure:
    outline, _ = ui.outline_and_gap(len(bars) // len(rows), gap=0.0)
    by_name = {name: [bar for bar in bars if bar.name == name] for name in _COLOURS}
    return ui.figure(
        [ui.bars_of(name, _COLOURS[name], mine, outline) for name, mine in by_name.items() if mine],
        barmode="overlay",
        bargap=0.18,
        xaxis=ui.axis("predicted time since the step began", range=[0, last_s * 1.01], **ui.SECONDS),
        yaxis=ui.axis("", categoryorder="array", categoryarray=rows, autorange="reversed", fixedrange=True, ticks=""),
        margin={"l": 148, "r": 16, "t": 34, "b": 48},
        **layout,
    )


def _plot(id_: str, rows: Sequence[str], label: str) -> ui.Html:
    return ui.plot(id_, 38 * len(rows) + 96, label)
