"""Predicted parts about one replica: key figures, memory over time, what would make
it quicker, and the figures that the prediction uses."""

from collections.abc import Sequence

from sambasim.costs.fit import Boundary
from sambasim.hardware.budget import load_calibration
from sambasim.hardware.spec import ClusterSpec, DeviceSpec
from sambasim.ir.program import Program
from sambasim.ir.types import SymbolKind
from sambasim.pef import Checked
from sambasim.report.advice import BACKED, NO_CHANGE, PRICED_IN, compared_text, gain_text, how_text, step_text
from sambasim.report.analysis import Analysis, mfu, mfu_text, range_text
from sambasim.report.devices import figures_table, value_text
from sambasim.report.page import ui
from sambasim.report.simulation import bound_text
from sambasim.report.steps import NOTE
from sambasim.report.tables import table, text_table, title_of
from sambasim.simulation.advice import Change, on_a_node
from sambasim.simulation.prediction import Prediction, backing_of, likely, zero_note
from sambasim.simulation.sync import SyncPath
from sambasim.units import GIB, KIB, MIB, TIB, format_bytes, format_rate, format_seconds, plain_rate


def facts_line(prediction: Prediction, digest: str | None, checked: Checked | None) -> list[tuple[str, str]]:
    """`digest` and `checked` are those of a PEF, if there is one."""
    device, tiles, step = prediction.device, prediction.tiles, prediction.steps[SyncPath.RDU][0]
    of_device = f"{device.tiles} tiles" if device.tiles else "whole"
    facts = [("device", f"{device.name}, {of_device}" if tiles is None else f"{device.name}, {tiles} of {of_device}")]
    if step.several_ranks:
        schedule = "none" if prediction.program.schedule is None else prediction.program.schedule.name
        facts += [("each rank", step.budget.where), ("mesh", str(step.mesh)), ("schedule", schedule)]
    else:
        facts.append(("level", prediction.level))
    facts += [
        ("batch", f"{step.batch_size} a replica"),
        ("cluster", prediction.cluster.name),
        ("step", "training" if prediction.program.training else "forward only"),
    ]
    return facts if digest is None else [*facts, ("PEF", digest[:12]), ("checked", str(checked or "no"))]


def caveat(prediction: Prediction) -> ui.Html:
    notes = [backing_of(prediction.device, 2 if prediction.program.training else 1)]
    notes += [NOTE] if prediction.program.ranks_of_replica > 1 else []
    text = f" A model of the device gives these numbers: {'. '.join([*notes, *zero_note(prediction.program)])}."
    return ui.element("p", ui.element("b", "Predicted, not measured."), text, class_="caveat")


def summary(analysis: Analysis) -> ui.Part:
    prediction, alone = analysis.prediction, analysis.step
    bounds = [
        (bound_text(prediction.alone, bound), amount, format_seconds(amount), ui.BOUNDS[bound])
        for bound, amount in alone.device_s_by_bound.items()
    ]
    kinds = [
        (kind.value, amount, format_seconds(amount), ui.KINDS[kind]) for kind, amount in alone.device_s_by_kind.items()
    ]
    by_bound = ui.shares(f"{format_seconds(alone.device_s)} on the device, by bound", bounds)
    by_kind = ui.shares("The same, by kind of section", kinds)
    return ui.Part(
        id="summary",
        title="The step at a glance",
        lead=f"One replica, unless more are named; {PRICED_IN}.",
        body=ui.joined(ui.keys(_keys(prediction)), ui.element("div", by_bound, by_kind, class_="pair")),
    )


def _keys(prediction: Prediction) -> list[tuple[str, str, str]]:
    alone, span = prediction.alone, likely(prediction)
    step = f"{format_seconds(alone.device_s)} device, {format_seconds(alone.host_s)} host"
    capacity = f"of {format_bytes(alone.budget.capacity_bytes)} {alone.budget.off_chip}"
    found = [
        ("step", format_seconds(alone.predicted_s), step),
        ("range", "unknown", "no published step is like this one")
        if span is None
        else ("range", range_text(span.least_s, span.most_s), span.basis),
        ("throughput", plain_rate(alone.samples_per_s), "samples/s, host time included"),
        ("MFU", f"{mfu(prediction):.1%}", mfu_text(prediction)),
        ("memory", format_bytes(alone.need.size_bytes), capacity),
    ]
    rdu, host = (prediction.steps[path][on_a_node(prediction)] for path in (SyncPath.RDU, SyncPath.HOST))
    if prediction.program.training is not None and rdu.replicas > 1:
        note = f"efficiency with sync by RDUs; {host.efficiency:.0%} by hosts"
        found.append((f"on {rdu.replicas} replicas", f"{rdu.efficiency:.0%}", note))
    return found


def grounds(device: DeviceSpec, cluster: ClusterSpec) -> ui.Part:
    parameters = [
        (title_of(name), value_text(name, parameter.value), parameter.meaning, parameter.source)
        for name, parameter in load_calibration().parameters().items()
    ]
    tables = (
        figures_table(f"Device: {device.name}", device),
        figures_table(f"Cluster: {cluster.name}", cluster),
        text_table("Calibration", ("number", "value", "meaning", "source"), (), parameters),
    )
    body = [*(ui.titled(shown, "sources") for shown in tables), ui.element("p", backing_of(device))]
    return ui.Part(
        id="grounds",
        title="Figures behind the prediction",
        lead="Published figures with their sources, and the calibrated numbers that turn them into times.",
        body=ui.element("details", ui.element("summary", "Show all figures and sources"), *body),
    )


_MOST_TENSORS = 8
_MOST_TICKS = 6
_NEAR = 3
"""A limit above this multiple of the need is written in the text instead of drawn."""


def memory(analysis: Analysis) -> ui.Part:
    prediction = analysis.prediction
    need, budget = prediction.alone.need, prediction.alone.budget
    most = need.kept_bytes + max(need.residency.taken_bytes, default=0)
    limits = [("Capacity", budget.capacity_bytes, ui.VERMILLION)]
    if budget.behind is not None:
        limits.insert(0, ("HBM", budget.behind.fast_bytes, ui.INK))
    drawn_limits = [limit for limit in limits if limit[1] <= _NEAR * most]
    top = max([most, *(size for _, size, _ in drawn_limits)]) * 1.08
    values, words = _byte_ticks(top)
    end_s = prediction.alone.predicted_s
    drawn = ui.figure(
        _memory_traces(prediction),
        hovermode="x",
        xaxis=ui.axis("predicted time since the step began, one replica", range=[0, end_s], **ui.SECONDS),
        yaxis=ui.axis("bytes", range=[0, top], tickvals=values, ticktext=words, fixedrange=True),
        margin={"l": 84, "r": 16, "t": 34, "b": 44},
        shapes=[
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": size, "y1": size,
             "line": {"color": colour, "width": 1.5, "dash": "dash"}}
            for _, size, colour in drawn_limits
        ],
        annotations=[
            {"xref": "paper", "x": 1, "xanchor": "right", "y": size, "yanchor": "bottom", "showarrow": False,
             "text": f"{name} {format_bytes(size)}", "font": {"color": colour, "size": 12}}
            for name, size, colour in drawn_limits
        ],
    )  # fmt: skip
    not_drawn = "".join(
        f" {name} is {format_bytes(size)}, far above the figure." for name, size, _ in limits if size > _NEAR * most
    )
    lead = (
        f"Use of {prediction.alone.budget.off_chip}: what the program keeps all the time, and on top of it "
        "tensors that one section writes and a later one reads."
    )
    tables = _kept_table(prediction.program), _largest_table(need.residency.boundaries)
    return ui.Part(
        id="memory",
        title="Memory over time",
        lead=lead + not_drawn,
        body=ui.joined(
            ui.without_host("memory-figure", prediction.alone.host_s, end_s),
            ui.plot("memory-figure", 320, "Off-chip memory in use over the step"),
            ui.element("div", *(ui.element("div", shown) for shown in tables), class_="pair"),
        ),
        figures={"memory-figure": drawn},
    )


def _memory_traces(prediction: Prediction) -> list[ui.Trace]:
    alone = prediction.alone
    taken = [*alone.need.residency.taken_bytes]
    taken += [0] * (len(alone.sections) - len(taken))
    at_s, heights = [0.0, alone.host_s], [0, 0]
    numbers: list[int | None] = [None, None]
    for number, (section, size) in enumerate(zip(alone.sections, taken, strict=True)):
        at_s += [at_s[-1], at_s[-1] + section.price.predicted_s]
        heights += [size, size]
        numbers += [number, number]
    kept = alone.need.kept_bytes
    kept_style = {"line": {"color": ui.SKY, "width": 0}, "fillcolor": ui.SKY, "hoverinfo": "skip"}
    between_style = {"line": {"color": ui.BLUE, "width": 0}, "fillcolor": ui.BLUE}
    hover = {"customdata": numbers, "meta": ui.Hover.MEMORY}
    return [
        ui.lines("kept by the program", at_s, [kept] * len(at_s), stackgroup="memory", **kept_style),
        ui.lines("between sections", at_s, heights, stackgroup="memory", **between_style, **hover),
    ]


def _byte_ticks(top_bytes: float) -> tuple[list[int], list[str]]:
    """Values and labels of an axis from 0 to `top_bytes`."""
    unit = next((factor for factor in (TIB, GIB, MIB, KIB) if top_bytes >= 2 * factor), 1)
    step = unit
    while top_bytes / step > _MOST_TICKS:
        step *= 2
    values = [step * number for number in range(int(top_bytes / step) + 1)]
    return values, [format_bytes(value).replace(".0 ", " ") for value in values]


def _kept_table(program: Program) -> ui.Html:
    rows = []
    for kind in SymbolKind:
        kept = [symbol for symbol in program.symbols.values() if symbol.kind is kind and symbol.offset is not None]
        size_bytes = sum(symbol.type.size_bytes for symbol in kept)
        if size_bytes and kind is not SymbolKind.ACCUMULATION_GROUP:  # these are the gradients again
            rows.append({"kind": kind.value.replace("_", " "), "symbols": len(kept), "size_bytes": size_bytes})
    title = f"Kept by the program: {format_bytes(program.device_bytes)}"
    return ui.titled(table(title, rows, "kind", "symbols, size_bytes:bytes"))


def _largest_table(boundaries: Sequence[Boundary]) -> ui.Html:
    order = sorted(boundaries, key=lambda boundary: (-boundary.size_bytes, boundary.address, boundary.value))
    largest = order[:_MOST_TENSORS]
    rows = [(tensor.value, f"{tensor.first} to {tensor.last}", format_bytes(tensor.size_bytes)) for tensor in largest]
    several = len(boundaries) > _MOST_TENSORS
    title = f"Largest between sections, of {len(boundaries)}" if several else "Tensors between sections"
    if not rows:
        none = ui.element("p", "None: all tensors stay on the chip.", class_="muted")
        return ui.joined(ui.element("h3", title), none)
    return ui.titled(text_table(title, ("tensor",), ("in sections", "bytes"), rows), "names")


def advice(analysis: Analysis) -> ui.Part:
    changes = analysis.advice.changes
    lead = (
        "Each change is predicted again by itself, and compared on the same hardware. Those that gain more than 2 % "
        "are listed, best first; gains do not add up."
    )
    listed = ui.element("ol", *map(_item, changes), class_="advice") if changes else ui.element("p", NO_CHANGE)
    return ui.Part("advice", "What would make it quicker", lead, ui.joined(listed, _devices(analysis)))


def _item(change: Change) -> ui.Html:
    numbers = ui.element("div", ui.element("b", f"step {step_text(change)}"), compared_text(change), class_="gain")
    words = ui.element("div", ui.element("b", change.what), how_text(change), class_="how")
    return ui.element("li", ui.element("span", gain_text(change), class_="factor"), words, numbers)


def _devices(analysis: Analysis) -> ui.Html:
    rows = [
        (one.device, "does not fit", "")
        if one.speed is None
        else (one.device, format_seconds(one.speed.step_s), format_rate(one.speed.samples_per_s))
        for one in analysis.advice.devices
    ]
    devices = ui.titled(text_table("One replica on a whole RDU", ("device",), ("step", "samples/s"), rows), "fitted")
    return ui.element("div", devices, ui.element("p", BACKED, class_="muted"), class_="under devices")
