"""Predicted parts about a replica of several ranks: its schedule, what each rank holds and waits for, and scaling."""

from collections.abc import Iterable, Iterator, Sequence

from sambasim.hardware.spec import DeviceSpec
from sambasim.ir.mesh import PIPELINE, TENSOR
from sambasim.ir.program import Program
from sambasim.ir.schedule import Action, ActionKind
from sambasim.pef import Checked
from sambasim.report.advice import PRICED_IN
from sambasim.report.mesh import AXIS_COLUMNS, RANK_COLUMNS, SCALING_COLUMNS, axis_rows, rank_rows, scaling_rows
from sambasim.report.mesh_records import NOTE, MeshRecord, mesh_record
from sambasim.report.mesh_trace import kind_of, title_of
from sambasim.report.page import ui
from sambasim.report.page.overview import of_pef
from sambasim.simulation.mesh import MeshStep
from sambasim.simulation.prediction import backing_of, zero_note
from sambasim.simulation.scaling import Track
from sambasim.simulation.sync import SyncPath
from sambasim.units import counted, format_bytes, format_seconds, plain_rate

_ACTIONS = {
    ActionKind.FORWARD: ui.SKY,
    ActionKind.BACKWARD: ui.BLUE,
    ActionKind.INPUT_GRADIENTS: ui.BLUE,
    ActionKind.WEIGHT_GRADIENTS: ui.DEEP,
}
_IDLE = ui.HAIRLINE
_ROW_PX, _FRAME_PX = 34, 100


def shown(steps: Sequence[MeshStep]) -> MeshStep:
    """The step that most parts are about: the most replicas that fit on one node, or the fewest; with sync by RDUs."""
    candidates = [step for step in steps if step.path is not SyncPath.HOST]
    inside = [step for step in candidates if step.placement.nodes == 1]
    return max(inside or candidates[:1], key=lambda step: step.mesh.world_size)


def facts_line(
    device: DeviceSpec, step: MeshStep, digest: str | None, checked: Checked | None
) -> list[tuple[str, str]]:
    program = step.program
    return [
        ("device", device.name),
        ("each rank", step.budget.where),
        ("mesh", str(step.mesh)),
        ("schedule", step.schedule.name if program.schedule is not None else "none"),
        ("batch", f"{program.replica_batch_size} a replica"),
        ("cluster", step.placement.cluster.name),
        *of_pef(digest, checked),
    ]


def caveat(device: DeviceSpec, program: Program) -> ui.Html:
    notes = "".join(f" {note}." for note in zero_note(program))
    text = f" A model of the device gives these numbers: {backing_of(device, 2)}. Moreover, {NOTE}.{notes}"
    return ui.element("p", ui.element("b", "Predicted, not measured."), text, class_="caveat")


def parts_of(steps: Sequence[MeshStep]) -> list[ui.Part]:
    step = shown(steps)
    record = mesh_record(step)
    return [_summary(step, record), _schedule(step), _ranks(record), _axes(record), _scaling(steps)]


def _summary(step: MeshStep, record: MeshRecord) -> ui.Part:
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
        ui.shares(f"{format_seconds(record.predicted_s)} of {_label(step, position)}", _shares(step, position))
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


def _shares(step: MeshStep, position: int) -> list[tuple[str, float, str, str]]:
    times = step.times_of(position)
    parts = [
        ("sections", times.device_s, ui.BLUE),
        ("host", times.host_s, ui.INK),
        *(
            (f"messages along {axis}", traffic.predicted_s, message_colour(axis))
            for axis, traffic in times.messages.items()
        ),
        ("idle", times.idle_s, _IDLE),
        ("update", times.update_s, ui.ORANGE),
        ("sync, and waiting for later ranks", times.exposed_sync_s, ui.GREEN),
    ]
    return [(name, seconds, format_seconds(seconds), colour) for name, seconds, colour in parts]


def _label(step: MeshStep, position: int) -> str:
    """The ranks of the first replica that have this position along pp."""
    first = step.mesh.group(0, PIPELINE)[position]
    last = first + step.mesh.size(TENSOR) - 1
    return f"rank {first}" if first == last else f"ranks {first}-{last}"


def _schedule(step: MeshStep) -> ui.Part:
    positions = range(len(step.ranks))
    syncs = step.path is not None
    rows = [row for position in positions for row in (_label(step, position), _sync_label(step, position))[: 1 + syncs]]
    bars = list(_bars(step))
    drawn = ui.figure(
        _traces(bars),
        barmode="overlay",
        bargap=0.14,
        uniformtext={"mode": "hide", "minsize": 9},
        xaxis=ui.axis("predicted time since the step began", range=[0, step.predicted_s * 1.01], **ui.SECONDS),
        yaxis=ui.axis("", categoryorder="array", categoryarray=rows, autorange="reversed", fixedrange=True, ticks=""),
        margin={"l": 120, "r": 16, "t": 34, "b": 48},
    )
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
    body = ui.plot("schedule-figure", _ROW_PX * len(rows) + _FRAME_PX, "When ranks compute, send and update")
    return ui.Part("schedule", f"The schedule on {step.mesh}", lead, body, {"schedule-figure": drawn})


def _sync_label(step: MeshStep, position: int) -> str:
    return f"{_label(step, position)} · sync"


def _bars(step: MeshStep) -> Iterator[ui.Bar]:
    several = step.schedule.stages > step.schedule.ranks
    for position, row in enumerate(step.timeline):
        name = _label(step, position)
        for began_s in (number * step.pass_s for number in range(step.micro_steps)):
            for action, start_s, stop_s in row:
                at_s = began_s + start_s
                for axis, traffic in step.cost(action).messages.items():
                    yield ui.Bar(f"messages along {axis}", name, at_s, traffic.predicted_s, title_of(action))
                    at_s += traffic.predicted_s
                text = str(action) if several else f"{action.kind}{action.micro_batch}"
                yield ui.Bar(kind_of(action), name, at_s, began_s + stop_s - at_s, title_of(action), text)
        for span in step.ranks[position].spans_after(step.passes_s):
            where = _sync_label(step, position) if span.track is Track.LINKS else name
            yield ui.Bar(span.kind, where, span.start_s, span.predicted_s, ui.visible(span.name))


def _traces(bars: Sequence[ui.Bar]) -> list[ui.Trace]:
    last = sorted(bars, key=lambda bar: bar.start_s)[-ui.MOST_SPANS :]
    line, _ = ui.bars(len(last) // len({bar.row for bar in last}), gap=0.0)
    names = dict.fromkeys(bar.name for bar in last)
    return [ui.bars_of(name, _colour(name), [bar for bar in last if bar.name == name], line) for name in names]


def message_colour(axis: str) -> str:
    return ui.VERMILLION if axis == PIPELINE else ui.GREY


def _colour(name: str) -> str:
    actions = {kind_of(Action(kind, 0, 0)): colour for kind, colour in _ACTIONS.items()}
    messages = {f"messages along {axis}": message_colour(axis) for axis in (PIPELINE, TENSOR)}
    return {**actions, **messages, **ui.KINDS}.get(name, ui.GREY)


def _ranks(record: MeshRecord) -> ui.Part:
    lead = (
        "The ranks of the first replica; others are alike. Parameters, gradients and states are those of the rank's "
        "stages and parts of tensors, without ZeRO; memory includes tensors between sections. The shares are of its "
        "time in passes: on the device or the host, in messages, and waiting for other stages."
    )
    return ui.Part("ranks", "Ranks", lead, _table(RANK_COLUMNS, rank_rows(record)))


def _table(columns: tuple[Sequence[str], Sequence[str]], rows: Iterable[Sequence[str]]) -> ui.Html:
    words, numbers = columns
    return ui.table((*words, *numbers), rows, words=len(words), class_="fitted")


def _axes(record: MeshRecord) -> ui.Part:
    lead = (
        "Bytes are those that all ranks of a replica receive in a step; over host links, also those that they send. "
        "Rank 0 waits along dp for sync that does not overlap with its backward, and along pp also while it is idle."
    )
    return ui.Part("axes", "Bytes and time by axis", lead, _table(AXIS_COLUMNS, axis_rows(record)))


def _scaling(steps: Sequence[MeshStep]) -> ui.Part:
    lead = (
        "Each replica has its own batch, so the global batch grows with the number of ranks. Efficiency is "
        "relative to the samples/s of one replica."
    )
    table = _table(SCALING_COLUMNS, scaling_rows(steps))
    counts = sorted({step.mesh.world_size for step in steps})
    if len(counts) == 1:
        return ui.Part("scaling", "Scaling", lead, table)
    curves = []
    for path in SyncPath:
        mine = sorted((one for one in steps if one.path in (None, path)), key=lambda one: one.mesh.world_size)
        x, y = [one.mesh.world_size for one in mine], [one.samples_per_s for one in mine]
        line = {"color": ui.PATHS[path], "width": 2.5}
        curves.append(ui.lines(f"sync by {path}", x, y, mode="lines+markers", line=line))
    drawn = ui.figure(
        curves,
        xaxis=ui.axis("ranks", type="log", tickvals=counts, ticktext=list(map(str, counts)), fixedrange=True),
        yaxis=ui.axis("predicted samples/s", type="log", exponentformat="SI", dtick=1, fixedrange=True),
    )
    plot = ui.plot("scaling-speed", 340, "Samples per second over ranks, by way to sync")
    return ui.Part("scaling", "Scaling", lead, ui.joined(plot, table), {"scaling-speed": drawn})
