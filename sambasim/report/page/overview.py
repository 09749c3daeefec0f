"""Predicted parts about one replica: key figures, memory over time, what would make it quicker, and what is used."""

from sambasim.hardware.budget import load_calibration
from sambasim.ir.types import SymbolKind
from sambasim.pef import Checked
from sambasim.report.analysis import BACKED, NO_CHANGE, NOT_VALIDATED, Analysis, change_texts, devices_table
from sambasim.report.devices import figures_table, value_text
from sambasim.report.inspect import sizes_of
from sambasim.report.page import ui
from sambasim.report.simulation import bound_text
from sambasim.report.tables import table, text_table, title_of
from sambasim.simulation.prediction import PRICED_IN, Prediction, backing_of, likely, zero_note
from sambasim.simulation.sync import SyncPath
from sambasim.units import GIB, KIB, MIB, TIB, format_bytes, format_seconds, plain_rate


def facts_line(prediction: Prediction, digest: str | None, checked: Checked | None) -> list[tuple[str, str]]:
    """`digest` and `checked` are those of a PEF, if there is one."""
    device, tiles, step = prediction.device, prediction.tiles, prediction.steps[SyncPath.RDU][0]
    of_device = f"{device.tiles} tiles" if device.tiles else "whole"
    facts = [("device", f"{device.name}, {of_device}" if tiles is None else f"{device.name}, {tiles} of {of_device}")]
    if step.several_ranks:
        schedule = "none" if prediction.program.schedule is None else prediction.program.schedule.name
        facts += [("each rank", step.alone.budget.where), ("mesh", str(step.mesh)), ("schedule", schedule)]
    else:
        facts.append(("level", prediction.level))
    facts += [("batch", f"{step.batch_size} a replica"), ("cluster", prediction.cluster.name)]
    facts.append(("step", "training" if prediction.program.training else "forward only"))
    return facts if digest is None else [*facts, ("PEF", digest[:12]), ("checked", str(checked or "no"))]


def caveat(prediction: Prediction) -> ui.Html:
    notes = [backing_of(prediction.device, 2 if prediction.program.training else 1)]
    notes += [NOT_VALIDATED] if prediction.program.ranks_of_replica > 1 else []
    text = f"A model of the device gives these numbers: {'. '.join([*notes, *zero_note(prediction.program)])}."
    return ui.caveat("Predicted, not measured.", text)


def summary(analysis: Analysis) -> ui.Part:
    prediction, alone, span = analysis.prediction, analysis.step, likely(analysis.prediction)
    unknown = ("unknown", "no published step is like this one")
    device, host = format_seconds(alone.device_s), format_seconds(alone.host_s)
    capacity = f"of {format_bytes(alone.budget.capacity_bytes)} {alone.budget.off_chip}"
    figures = [
        ("step", format_seconds(alone.predicted_s), f"{device} device, {host} host"),
        ("range", *((span.range, span.basis) if span else unknown)),
        ("throughput", plain_rate(alone.samples_per_s), "samples/s, host time included"),
        ("MFU", f"{analysis.mfu:.1%}", analysis.mfu_text),
        ("memory", format_bytes(alone.need.size_bytes), capacity),
    ]
    by_rdu, by_host = map(prediction.on_a_node, (SyncPath.RDU, SyncPath.HOST))
    if prediction.program.training is not None and by_rdu.replicas > 1:
        note = f"efficiency with sync by RDUs; {by_host.efficiency:.0%} by hosts"
        figures.append((f"on {by_rdu.replicas} replicas", f"{by_rdu.efficiency:.0%}", note))
    bounds = ((bound_text(alone, bound), s, ui.BOUNDS[bound]) for bound, s in alone.device_s_by_bound.items())
    kinds = ((kind.value, seconds, ui.KINDS[kind]) for kind, seconds in alone.device_s_by_kind.items())
    bars = ui.shares(f"{device} on the device, by bound", bounds), ui.shares("The same, by kind of section", kinds)
    lead = f"One replica, unless more are named; {PRICED_IN}."
    return ui.Part("summary", "The step at a glance", lead, ui.joined(ui.keys(figures), ui.pair(*bars)))


def grounds(prediction: Prediction) -> ui.Part:
    device, cluster = prediction.device, prediction.cluster
    parameters = [
        (title_of(name), value_text(name, parameter.value), parameter.meaning, parameter.source)
        for name, parameter in load_calibration().parameters().items()
    ]
    published = [figures_table(f"Device: {device.name}", device), figures_table(f"Cluster: {cluster.name}", cluster)]
    calibrated = text_table("Calibration", ("number", "value", "meaning", "source"), (), parameters)
    tables = (ui.titled(shown, "sources") for shown in (*published, calibrated))
    heading, backing = ui.element("summary", "Show all figures and sources"), ui.element("p", backing_of(device))
    lead = "Published figures with their sources, and the calibrated numbers that turn them into times."
    body = ui.element("details", heading, *tables, backing)
    return ui.Part("grounds", "Figures behind the prediction", lead, body)


def memory(analysis: Analysis) -> ui.Part:
    alone, need, budget = analysis.step, analysis.step.need, analysis.step.budget
    most = need.kept_bytes + max(need.residency.taken_bytes(), default=0)
    limits = [("Capacity", budget.capacity_bytes, ui.VERMILLION)]
    if budget.behind is not None:
        limits.insert(0, ("HBM", budget.behind.fast_bytes, ui.INK))
    near = [limit for limit in limits if limit[1] <= 3 * most]  # others are written in the text instead of drawn
    top = max([most, *(size for _, size, _ in near)]) * 1.08
    drawn = ui.figure(
        _memory_traces(analysis),
        hovermode="x",
        xaxis=ui.axis("predicted time since the step began, one replica", range=[0, alone.predicted_s], **ui.SECONDS),
        yaxis=ui.axis("bytes", range=[0, top], **_byte_ticks(top), fixedrange=True),
        margin={"l": 84, "r": 16, "t": 34, "b": 44},
        shapes=[
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": size, "y1": size,
             "line": {"color": colour, "width": 1.5, "dash": "dash"}}
            for _, size, colour in near
        ],
        annotations=[
            {"xref": "paper", "x": 1, "xanchor": "right", "y": size, "yanchor": "bottom", "showarrow": False,
             "text": f"{name} {format_bytes(size)}", "font": {"color": colour, "size": 12}}
            for name, size, colour in near
        ],
    )  # fmt: skip
    lead = (
        f"Use of {budget.off_chip}: what the program keeps all the time, and on top of it "
        "tensors that one section writes and a later one reads."
    )
    far = (limit for limit in limits if limit not in near)
    lead += "".join(f" {name} is {format_bytes(size)}, far above the figure." for name, size, _ in far)
    tables = (ui.element("div", shown) for shown in (_kept_table(analysis), _largest_table(analysis)))
    button = ui.without_host("memory-figure", alone.host_s, alone.predicted_s)
    body = ui.joined(button, ui.plot("memory-figure", 320, "Off-chip memory in use over the step"), ui.pair(*tables))
    return ui.Part("memory", "Memory over time", lead, body, {"memory-figure": drawn})


def _memory_traces(analysis: Analysis) -> list[ui.Trace]:
    alone = analysis.step
    taken = alone.need.residency.taken_bytes()
    taken += [0] * (len(alone.sections) - len(taken))
    at_s, heights = [0.0, alone.host_s], [0, 0]
    numbers: list[int | None] = [None, None]
    for number, (section, size) in enumerate(zip(alone.sections, taken, strict=True)):
        at_s += [at_s[-1], at_s[-1] + section.price.predicted_s]
        heights += [size, size]
        numbers += [number, number]
    hovers: tuple[dict[str, object], ...] = ({"hoverinfo": "skip"}, {"customdata": numbers, "meta": "memory"})
    layers = {"kept by the program": [alone.need.kept_bytes] * len(at_s), "between sections": heights}
    return [
        ui.lines(name, at_s, y, stackgroup="memory", line={"color": colour, "width": 0}, fillcolor=colour, **hover)
        for (name, y), colour, hover in zip(layers.items(), (ui.SKY, ui.BLUE), hovers, strict=True)
    ]


def _byte_ticks(top_bytes: float) -> dict[str, object]:
    step = next((factor for factor in (TIB, GIB, MIB, KIB) if top_bytes >= 2 * factor), 1)
    while top_bytes / step > 6:
        step *= 2
    values = [step * number for number in range(int(top_bytes / step) + 1)]
    return {"tickvals": values, "ticktext": [format_bytes(value).replace(".0 ", " ") for value in values]}


def _kept_table(analysis: Analysis) -> ui.Html:
    program, again = analysis.prediction.program, SymbolKind.ACCUMULATION_GROUP  # which are the gradients
    kept = [one for one in program.symbols.values() if one.offset is not None and one.kind is not again]
    sizes = (row for row in sizes_of(kept) if row.size_bytes)
    rows = [row.model_dump() | {"kind": row.kind.replace("_", " ")} for row in sizes]
    title = f"Kept by the program: {format_bytes(program.device_bytes)}"
    return ui.titled(table(title, rows, "kind", "symbols, size_bytes:bytes"))


def _largest_table(analysis: Analysis) -> ui.Html:
    tensors = analysis.step.need.residency.boundaries
    largest = sorted(tensors, key=lambda tensor: (-tensor.size_bytes, tensor.address, tensor.value))[:8]
    rows = [(tensor.value, f"{tensor.first} to {tensor.last}", format_bytes(tensor.size_bytes)) for tensor in largest]
    several = len(tensors) > len(largest)
    title = f"Largest between sections, of {len(tensors)}" if several else "Tensors between sections"
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
    items = []
    for change in changes:
        gain, steps, rates, how = change_texts(change)
        numbers = ui.element("div", ui.element("b", f"step {steps}"), rates, class_="gain")
        words = ui.element("div", ui.element("b", change.what), how, class_="how")
        items.append(ui.element("li", ui.element("span", gain, class_="factor"), words, numbers))
    listed = ui.element("ol", *items, class_="advice") if changes else ui.element("p", NO_CHANGE)
    devices, backed = ui.titled(devices_table(analysis.advice), "fitted"), ui.element("p", BACKED, class_="muted")
    under = ui.element("div", devices, backed, class_="under devices")
    return ui.Part("advice", "What would make it quicker", lead, ui.joined(listed, under))
