"""Predicted parts about sections: times, roofs, the tensors between them, the pipeline of one, and all operators."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10, sqrt

from sambasim.costs.price import chip_bytes
from sambasim.errors import printable
from sambasim.ir.graph import SectionKind
from sambasim.ir.operators import OPERATORS
from sambasim.report.analysis import Analysis, Roof
from sambasim.report.page import ui
from sambasim.report.simulation import bound_text
from sambasim.simulation.alone import MODEL_KINDS
from sambasim.units import counted, format_bytes, format_count, format_seconds

_PARTS: Mapping[str, str] = {"compute": ui.BLUE, "memory": ui.ORANGE, "fill": ui.SKY, "launch": ui.GREY}


def sections_part(analysis: Analysis) -> ui.Part:
    timed = analysis.step.sections
    prices, numbers = [section.price for section in timed], list(range(len(timed)))
    seconds = {name: [getattr(price, f"{name}_s") for price in prices] for name in _PARTS}
    for number, price in enumerate(prices):  # they overlap
        seconds["memory" if price.compute_s > price.memory_s else "compute"][number] = 0.0
    shared: ui.Trace = {"type": "bar", "x": numbers, "customdata": numbers, "meta": "sections"}
    line, gap = ui.outline_and_gap(len(timed), gap=0.12)
    traces: list[ui.Trace] = [
        {**shared, "name": name, "y": seconds[name], "marker": {"color": colour, "line": line}}
        for name, colour in _PARTS.items()
    ]
    in_use = [price.compute_s / (price.predicted_s or 1.0) for price in prices]
    marker = {"color": [ui.BOUNDS[price.bound] for price in prices], "line": line}
    second = {"name": "compute in use", "yaxis": "y2", "showlegend": False}
    traces.append({**shared, **second, "y": in_use, "marker": marker})
    most = min(1.0, max(0.05, 1.15 * max(in_use)))
    every_number = {"dtick": 1} if len(timed) <= 32 else {}
    x_title, x_range = "section, in the order of execution", [-0.6, len(timed) - 0.4]
    drawn = ui.figure(
        traces,
        barmode="stack",
        bargap=gap,
        xaxis=ui.axis(x_title, anchor="y2", range=x_range, showgrid=False, tickformat="d", **every_number),
        yaxis=ui.axis("predicted", domain=[0.42, 1], fixedrange=True, **ui.SECONDS),
        yaxis2=ui.axis("compute in use", domain=[0, 0.3], range=[0, most], fixedrange=True, tickformat=".0%", nticks=5),
        legend={**ui.LEGEND, "traceorder": "normal"},
    )
    lead = (
        "Memory and compute overlap, so a bar shows the longer of the two, and above it the time to fill and drain "
        "the pipeline and to launch the section. Below: the share of its time in which the slowest stage computes, "
        "coloured by the bound of the section. The table, the most time first, has one row for equal sections of "
        "repeated layers; PCUs are those on which operators of a section are placed, PMUs those that its weights "
        "and buffers need. A click on a bar or a row shows the section in detail further down."
    )
    plot = ui.plot("sections-figure", 400, "Seconds and use of compute, section by section")
    body = ui.joined(plot, ui.live_table("sections-rows", "Search sections: name, kind, bound"))
    rows = [_section_row(analysis, number) for number in numbers]
    data = {"sections": rows, "folds": analysis.folds, "parts": list(_PARTS.items())}
    return ui.Part("sections", "Sections", lead, body, {"sections-figure": drawn}, data)


def _section_row(analysis: Analysis, number: int) -> list[object]:
    """The fields of `sections` in page.js, in order."""
    section = analysis.step.sections[number]
    price, load = section.price, section.load
    return [
        *(number, section.kind.value, printable(section.name), section.load.stages),
        *(price.compute_s, price.memory_s, price.fill_s, price.launch_s, price.predicted_s),
        *(load.read_bytes, load.written_bytes, load.resident_bytes, load.product_flops),
        *(bound_text(analysis.step, price.bound), ui.BOUNDS[price.bound], printable(analysis.lines[number])),
        *(analysis.step.runs(section), section.unit_share, section.chip_share),
    ]


def pipeline(analysis: Analysis) -> ui.Part:
    step, rows = analysis.step, analysis.stages.rows
    with_stages = [fold for fold in analysis.folds if rows[fold[0]]]
    steps = (("← previous", -1), ("next →", 1))
    buttons = (ui.element("button", words, type="button", data_step=step) for words, step in steps)
    picker = ui.element("label", "Section ", ui.element("select", id="pipeline-choice"))
    lead = (
        "Samples stream through the operators from top to bottom; all operators run at the same time. Arcs are "
        "buffers on the chip, from the operator that writes one to those that read it; their tensors never go to "
        "memory. Other tensors are read from memory or written to it. Weights stay on the chip while samples "
        "stream through."
    )
    tools = ui.element("div", picker, ui.element("span", *buttons), class_="tools")
    body = ui.joined(tools, *(ui.element("div", id=f"pipeline-{name}") for name in ("head", "stages")))
    data = {
        "pipeline": rows,
        "first_section": max(with_stages, key=analysis.fold_s)[0] if with_stages else 0,
        "on_chip": [chip_bytes(section.load, step.budget) for section in step.sections],
        "chip": step.budget.chip_bytes,
    }
    return ui.Part("pipeline", "Pipeline of a section", lead, body, data=data)


def operators(analysis: Analysis) -> ui.Part:
    graph = analysis.prediction.graph
    strings: dict[str, int] = {}  # names of modules and source lines repeat often
    section_of: dict[int, int] = {}
    for number, section in enumerate(analysis.step.sections):
        section_of.update(dict.fromkeys(range(*section.nodes), number))
    working = {stage.node for stage in analysis.step.work.stages}
    rows = []
    for place, node in enumerate(graph.nodes):
        types = ", ".join(str(graph.values[name]) for name in node.makes if name in graph.values)
        file, line, code = (node.source.file, node.source.line, node.source.code) if node.source else ("", None, "")
        kind = OPERATORS[node.operator].kind.value
        texts = (node.operator, kind, types, node.name, node.module, file, code.strip())
        indices = (strings.setdefault(printable(text), len(strings)) for text in texts)
        rows.append([place, section_of.get(place), place in working, *indices, line])
    lead = (
        "All operators of the graph, in order. A backward operator has the source line of its forward operator. "
        "Grey operators are views or constants and take no time on the device."
    )
    body = ui.live_table("operators-rows", "Search: name, module, file:line, code, shape")
    data = {"operators": rows, "strings": list(strings)}
    return ui.Part("operators", "Operators and source lines", lead, body, data=data)


def roofline(analysis: Analysis) -> ui.Part:
    sections = analysis.step.sections
    places: dict[tuple[int, ...], tuple[float, float]] = {}
    for fold in analysis.folds:
        load, price = sections[fold[0]].load, sections[fold[0]].price
        if load.product_flops > 0 and load.traffic_bytes > 0:
            places[fold] = load.product_flops / load.traffic_bytes, load.product_flops / price.predicted_s
    lead = (
        "A point is a section, or equal sections of repeated layers: its FLOPs per byte of traffic, and its FLOP/s; "
        "its area is its share of the device time, its colour its bound. The lines are what the tiles in use "
        f"can do at most: {analysis.roofs_text}. A click on a point shows its section further down."
    )
    if without := len(sections) - sum(map(len, places)):
        are = "is" if without == 1 else "are"
        lead += f" {counted(without, 'section')} without products or traffic, such as updates, {are} not drawn."
    if not places:
        return ui.Part("roofline", "Roofline", lead)
    reach, peak = analysis.reachable, analysis.published
    xs = [*(x for x, _ in places.values()), reach.ridge, peak.ridge]
    ys = [*(y for _, y in places.values()), peak.flops_per_s]
    ends = (min(xs) / 2, max(xs) * 2)
    published = _roof("published", peak, ends, {"color": ui.GREY, "width": 1.5, "dash": "dash"})
    reachable = _roof("reachable", reach, ends, {"color": ui.INK, "width": 2})
    drawn = ui.figure(
        [published, reachable, *_points(analysis, places)],
        xaxis=ui.axis("FLOPs per byte of traffic", type="log", **_ticks(ends)),
        yaxis=ui.axis("predicted FLOP/s", type="log", **_ticks((min(ys), max(ys)))),
        margin={"l": 64, "r": 16, "t": 52, "b": 48},
    )
    label = "FLOP/s of sections over their FLOPs per byte, below the roofs of the device"
    return ui.Part("roofline", "Roofline", lead, ui.plot("roofline-figure", 420, label), {"roofline-figure": drawn})


def _ticks(ends: tuple[float, float]) -> dict[str, object]:
    """1, 2 and 5 of each power of ten between `ends`."""
    decades = range(floor(log10(ends[0])), ceil(log10(ends[1])) + 1)
    values = [digit * 10.0**power for power in decades for digit in (1, 2, 5)]
    return {"tickvals": values, "ticktext": [format_count(value).replace(".0 ", " ") for value in values]}


def _roof(name: str, roof: Roof, ends: tuple[float, float], line: dict[str, object]) -> ui.Trace:
    xs = [ends[0], roof.ridge, ends[1]]
    return ui.lines(name, xs, [roof.at(x) for x in xs], line=line, hoverinfo="skip")


def _points(analysis: Analysis, places: Mapping[tuple[int, ...], tuple[float, float]]) -> Iterator[ui.Trace]:
    """The points of each bound, the largest first, so that smaller ones are not hidden."""
    for bound, colour in ui.BOUNDS.items():
        folds = [fold for fold in places if analysis.step.sections[fold[0]].price.bound is bound]
        folds.sort(key=lambda fold: -analysis.fold_s(fold))
        if folds:
            shares = [analysis.fold_s(fold) / analysis.step.device_s for fold in folds]
            sizes = [max(7, 44 * share**0.5) for share in shares]
            marker = {"color": colour, "size": sizes, "opacity": 0.8, "line": {"color": "white", "width": 1}}
            xs, ys = zip(*(places[fold] for fold in folds), strict=True)
            hover = {"customdata": [fold[0] for fold in folds], "meta": "roofline"}
            yield ui.lines(bound_text(analysis.step, bound), xs, ys, mode="markers", marker=marker, **hover)


MOST_BOXES = 400  # a drawing with more is slow to open

_WIDTH, _HEIGHT, _PITCH = 262, 54, 82
_SIDE, _MIDDLE, _TOP = 84, 180, 14
_NAME_LETTERS, _LINE_LETTERS = 29, 35
_LABEL = (62, 15)  # width and height of a label, which must not cover another


@dataclass(frozen=True, slots=True)
class _Box:
    """Sections `first` to `last`: one, a run of repeated layers, or the whole update. x, y is the left upper corner."""

    first: int
    last: int
    kind: SectionKind
    name: str
    facts: str
    line: str
    share: float
    x: float
    y: float

    @property
    def numbers(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


def section_graph(analysis: Analysis) -> ui.Part:
    lead = (
        "The forward runs down on the left, the backward up on the right; repeated layers are one box. A curve is what "
        "a section reads of what another wrote: bytes of one pass, of all layers of a box. Parameters, and tensors "
        "inside of sections, are not drawn. A bar is the box's share of the device time. A click on a box shows its "
        "section further down."
    )
    boxes = _boxes(analysis)
    if len(boxes) > MOST_BOXES:
        body = ui.element("p", f"With {len(boxes)} boxes it is too large to draw: a higher level has fewer sections.")
    else:
        body = ui.element("div", _drawing(analysis, boxes), class_="graph")
    return ui.Part("graph", "Sections and tensors", lead, body)


def _boxes(analysis: Analysis) -> list[_Box]:
    sections = analysis.step.sections
    spans = [(sections[run.start].kind, range(run.start, run.stop)) for run in analysis.runs]
    left, backward = ([span for kind, span in spans if kind is wanted] for wanted in MODEL_KINDS)
    update = [range(len(analysis.step.model), len(sections))] if analysis.step.update else []
    right = [*backward, *update][::-1]
    rows = max(len(left), len(right), 1)
    boxes = []
    for x, column in ((_SIDE, left), (_SIDE + _WIDTH + _MIDDLE, right)):
        # Boxes of the shorter column are spread over the height of the longer one.
        heights = [_TOP + _PITCH * (place + 0.5) * rows / len(column) - _PITCH / 2 for place in range(len(column))]
        placed = [_box(analysis, span, x, y) for span, y in zip(column, heights, strict=True)]
        boxes += placed if column is left else placed[::-1]
    return boxes


def _box(analysis: Analysis, span: range, x: float, y: float) -> _Box:
    step = analysis.step
    costliest = max(span, key=lambda number: step.sections[number].price.predicted_s)
    seconds, shown = sum(step.device_s_of(step.sections[number]) for number in span), step.sections[costliest]
    name, facts, line = shown.name, shown.kind.value, analysis.lines[costliest]
    if shown.kind not in MODEL_KINDS:
        name, facts, line = "update", counted(len(span), "section"), ""
    elif len(span) > 1:
        run = next(run for run in analysis.runs if run.start == span[0])
        facts = f"\u00d7{run.count}" + (f" of {counted(run.period, 'section')}" if run.period > 1 else "")
    share = seconds / step.device_s if step.device_s else 0.0
    facts = f"{facts} \u00b7 {format_seconds(seconds)} \u00b7 {share:.0%}"
    return _Box(span[0], span[-1], shown.kind, name, facts, line, share, x, y)


def _drawing(analysis: Analysis, boxes: Sequence[_Box]) -> ui.Html:
    box_of = {number: place for place, box in enumerate(boxes) for number in range(box.first, box.last + 1)}
    between: Counter[tuple[int, int]] = Counter()
    for (writer, reader), size_bytes in analysis.stages.tensors.items():
        if box_of[writer] != box_of[reader]:
            between[box_of[writer], box_of[reader]] += size_bytes
    most = max(between.values(), default=1)
    curves, labels, placed = [], [], list[tuple[float, float]]()
    for (start, stop), size in between.most_common():
        path, (x, y) = _path(boxes, start, stop)
        a, b = boxes[start], boxes[stop]
        title = ui.element("title", f"{format_bytes(size)} from {a.numbers} {a.name} to {b.numbers} {b.name}")
        width = f"{1 + 6 * sqrt(size / most):.1f}"
        curves.append(ui.element("path", title, d=path, stroke_width=width, data_from=start, data_to=stop))
        # The bytes of the largest curves, as many as have room.
        if all(abs(x - other_x) > _LABEL[0] or abs(y - other_y) > _LABEL[1] for other_x, other_y in placed):
            placed.append((x, y))
            labels.append(ui.element("text", format_bytes(size), x=f"{x:.0f}", y=f"{y + 4:.0f}", class_="size"))
    width = f"{_SIDE + max(box.x + _WIDTH for box in boxes):.0f}"
    height = f"{max(box.y for box in boxes) + _PITCH:.0f}"
    extent = {"viewBox": f"0 0 {width} {height}", "width": width, "height": height}
    children = (*curves, *(_box_html(place, box) for place, box in enumerate(boxes)), *labels)
    return ui.element("svg", *children, **extent, role="group", aria_label="Sections, and the tensors between them")


def _path(boxes: Sequence[_Box], start: int, stop: int) -> tuple[str, tuple[float, float]]:
    """With the place of its label."""
    a, b = boxes[start], boxes[stop]
    if a.x == b.x and stop == start + 1:
        x = a.x + _WIDTH / 2
        y, end_y = (a.y + _HEIGHT, b.y) if b.y > a.y else (a.y, b.y + _HEIGHT)
        return f"M{x:.0f} {y:.0f}L{x:.0f} {end_y:.0f}", (x, (y + end_y) / 2)
    if a.x != b.x:
        x, end_x, part = a.x + _WIDTH, b.x, 0.7
        reach = label_x = (x + end_x) / 2
    else:
        outward, x, part = (-1, a.x, 0.5) if a.x == _SIDE else (1, a.x + _WIDTH, 0.5)
        end_x, reach = x, x + outward * min(1.25 * _SIDE, 24 * sqrt(stop - start))
        label_x = x + 0.75 * (reach - x)
    y, end_y = a.y + part * _HEIGHT, b.y + part * _HEIGHT
    path = f"M{x:.0f} {y:.0f}C{reach:.0f} {y:.0f} {reach:.0f} {end_y:.0f} {end_x:.0f} {end_y:.0f}"
    return path, (label_x, (y + end_y) / 2)


def _box_html(place: int, box: _Box) -> ui.Html:
    def text(words: str, y: float, class_: str) -> ui.Html:
        return ui.element("text", words, x=f"{box.x + 14:.0f}", y=f"{box.y + y:.0f}", class_=class_)

    def cut(words: str, most: int) -> str:
        """The end, which says more than the beginning."""
        return words if len(words) <= most else f"\u2026{words[1 - most :]}"

    at = {"x": f"{box.x:.0f}", "y": f"{box.y:.0f}"}
    under = {"x": f"{box.x + 6:.0f}", "y": f"{box.y + _HEIGHT - 4:.0f}"}
    bar = f"{max(1.0, (_WIDTH - 6) * box.share):.1f}"
    return ui.element(
        "g",
        ui.element("title", f"{box.numbers} {box.name}\n{box.facts}\n{box.line}"),
        ui.element("rect", **at, width=_WIDTH, height=_HEIGHT, rx=5, class_="frame"),
        ui.element("rect", **at, width=6, height=_HEIGHT, fill=ui.KINDS[box.kind]),
        ui.element("rect", **under, width=bar, height=4, fill=ui.VERMILLION),
        text(f"{box.numbers}  {cut(box.name, _NAME_LETTERS - len(box.numbers))}", 16, "name"),
        text(box.facts, 31, "facts"),
        text(cut(box.line, _LINE_LETTERS), 45, "line"),
        class_="box",
        tabindex=0,
        role="button",
        data_box=place,
        data_first=box.first,
        data_last=box.last,
    )
