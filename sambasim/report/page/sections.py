"""Predicted parts about sections: their times, the pipeline of a chosen section, all operators, and
the roofs of the device."""

from math import ceil, floor, log10

from sambasim.costs.load import chip_bytes
from sambasim.ir.graph import Node
from sambasim.ir.operators import OPERATORS
from sambasim.report.analysis import Analysis, Roof, published, reachable, roofs_text
from sambasim.report.folds import Fold
from sambasim.report.page import ui
from sambasim.report.simulation import bound_text
from sambasim.simulation.alone import TimedSection
from sambasim.simulation.prediction import Prediction
from sambasim.units import counted, format_count

_MOST_NUMBERED = 32
"""With more sections, not every number is written at the axis."""

_LEAST_SHARE = 0.05


def sections_part(analysis: Analysis) -> ui.Part:
    timed = analysis.step.sections
    numbers = list(range(len(timed)))
    shared: ui.Trace = {"type": "bar", "x": numbers, "customdata": numbers, "meta": ui.Hover.SECTIONS}
    line, gap = ui.bars(len(timed), gap=0.12)
    traces: list[ui.Trace] = [
        {**shared, "name": name, "y": seconds, "marker": {"color": ui.PARTS[name], "line": line}}
        for name, seconds in _stacked_seconds(timed).items()
    ]
    in_use = [section.price.compute_s / (section.price.predicted_s or 1.0) for section in timed]
    marker = {"color": [ui.BOUNDS[section.price.bound] for section in timed], "line": line}
    second = {"name": "compute in use", "yaxis": "y2", "showlegend": False}
    traces.append({**shared, **second, "y": in_use, "marker": marker})
    most = min(1.0, max(_LEAST_SHARE, 1.15 * max(in_use)))
    every_number = {"dtick": 1} if len(timed) <= _MOST_NUMBERED else {}
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
    rows = [_section_row(analysis, number, section) for number, section in enumerate(timed)]
    return ui.Part(
        id="sections",
        title="Sections",
        lead=(
            "Memory and compute overlap, so a bar shows the longer of the two, and above it the time to fill and drain "
            "the pipeline and to launch the section. Below: the share of its time in which the slowest stage computes, "
            "coloured by the bound of the section. The table, the most time first, has one row for equal sections of "
            "repeated layers; PCUs are those on which operators of a section are placed, PMUs those that its weights "
            "and buffers need. A click on a bar or a row shows the section in detail further down."
        ),
        body=ui.joined(
            ui.plot("sections-figure", 400, "Seconds and use of compute, section by section"),
            ui.live_table("sections-rows", "Search sections: name, kind, bound"),
        ),
        figures={"sections-figure": drawn},
        data={"sections": rows, "folds": [fold.numbers for fold in analysis.folds], "parts": list(ui.PARTS.items())},
    )


def _stacked_seconds(timed: tuple[TimedSection, ...]) -> dict[str, list[float]]:
    prices = [section.price for section in timed]
    return {
        "compute": [price.compute_s if price.compute_s > price.memory_s else 0.0 for price in prices],
        "memory": [price.memory_s if price.memory_s >= price.compute_s else 0.0 for price in prices],
        "fill": [price.fill_s for price in prices],
        "launch": [price.launch_s for price in prices],
    }


def _section_row(analysis: Analysis, number: int, section: TimedSection) -> list[object]:
    """The fields of `sections` in page.js, in order."""
    price, load = section.price, section.load
    times_s = (price.compute_s, price.memory_s, price.fill_s, price.launch_s, price.predicted_s)
    traffic_bytes = (load.read_bytes, load.written_bytes, load.resident_bytes)
    bound = (bound_text(analysis.step, price.bound), ui.BOUNDS[price.bound])
    head = (number, section.kind.value, ui.visible(section.name), section.operators)
    return [
        *head,
        *times_s,
        *traffic_bytes,
        load.product_flops,
        *bound,
        ui.visible(analysis.lines[number]),
        analysis.step.runs(section),
        section.unit_share,
        section.chip_share,
    ]


def pipeline(analysis: Analysis) -> ui.Part:
    prediction, timed = analysis.prediction, analysis.step.sections
    with_stages = [fold for fold in analysis.folds if analysis.stages.rows[fold.numbers[0]]]
    first = max(with_stages, key=analysis.fold_s).numbers[0] if with_stages else 0
    picker = ui.element("label", "Section ", ui.element("select", id="pipeline-choice"))
    steps = ui.element(
        "span",
        ui.element("button", "← previous", type="button", data_step=-1),
        ui.element("button", "next →", type="button", data_step=1),
    )
    return ui.Part(
        id="pipeline",
        title="Pipeline of a section",
        lead=(
            "Samples stream through the operators from top to bottom; all operators run at the same time. Arcs are "
            "buffers on the chip, from the operator that writes one to those that read it; their tensors never go to "
            "memory. Other tensors are read from memory or written to it. Weights stay on the chip while samples "
            "stream through."
        ),
        body=ui.joined(
            ui.element("div", picker, steps, class_="tools"),
            ui.element("div", id="pipeline-head"),
            ui.element("div", id="pipeline-stages"),
        ),
        data={
            "pipeline": analysis.stages.rows,
            "first_section": first,
            "on_chip": [chip_bytes(section.load, prediction.alone.budget) for section in timed],
            "chip": prediction.alone.budget.chip_bytes,
        },
    )


def operators(analysis: Analysis) -> ui.Part:
    prediction = analysis.prediction
    strings: dict[str, int] = {}  # names of modules and source lines repeat often
    section_of: dict[int, int] = {}
    for number, section in enumerate(prediction.alone.sections):
        section_of.update(dict.fromkeys(range(*section.nodes), number))
    working = {stage.node for stage in analysis.work.stages}
    rows = [
        [
            place,
            section_of.get(place),
            place in working,
            *(strings.setdefault(ui.visible(text), len(strings)) for text in _operator_strings(prediction, node)),
            node.source.line if node.source else None,
        ]
        for place, node in enumerate(prediction.graph.nodes)
    ]
    return ui.Part(
        id="operators",
        title="Operators and source lines",
        lead=(
            "All operators of the graph, in order. A backward operator has the source line of its forward operator. "
            "Grey operators are views or constants and take no time on the device."
        ),
        body=ui.live_table("operators-rows", "Search: name, module, file:line, code, shape"),
        data={"operators": rows, "strings": list(strings)},
    )


def _operator_strings(prediction: Prediction, node: Node) -> tuple[str, ...]:
    """The texts of a node: operator, kind, result types, name, module, file, code."""
    graph = prediction.graph
    types = ", ".join(str(graph.values[name]) for name in node.results if name is not None and name in graph.values)
    file, code = (node.source.file, node.source.code.strip()) if node.source else ("", "")
    return node.operator, OPERATORS[node.operator].kind.value, types, node.name, node.module, file, code


_LEAST_PX, _MOST_PX = 7, 44
_MARGIN = 2.0
"""The axes go on by this factor beyond the points and the ridge."""


def roofline(analysis: Analysis) -> ui.Part:
    points = [(fold, *_place(analysis, fold)) for fold in analysis.folds if _has_place(analysis, fold)]
    without = sum(len(fold.numbers) for fold in analysis.folds if not _has_place(analysis, fold))
    lead = (
        "A point is a section, or equal sections of repeated layers: its FLOPs per byte of traffic, and its FLOP/s; "
        "its area is its share of the device time, its colour its bound. The lines are what the tiles in use "
        f"can do at most: {roofs_text(analysis.prediction)}. A click on a point shows its section further down."
    )
    if without:
        are = "is" if without == 1 else "are"
        lead += f" {counted(without, 'section')} without products or traffic, such as updates, {are} not drawn."
    if not points:
        return ui.Part("roofline", "Roofline", lead, ui.joined())
    reach, peak = reachable(analysis.prediction), published(analysis.prediction)
    xs = [x for _, x, _ in points] + [reach.ridge, peak.ridge]
    ends = (min(xs) / _MARGIN, max(xs) * _MARGIN)
    ys = [*(y for _, _, y in points), peak.flops_per_s]
    traces = [
        _roof("published", peak, ends, {"color": ui.GREY, "width": 1.5, "dash": "dash"}),
        _roof("reachable", reach, ends, {"color": ui.INK, "width": 2}),
        *_points(analysis, points),
    ]
    drawn = ui.figure(
        traces,
        xaxis=ui.axis("FLOPs per byte of traffic", type="log", **_ticks(ends)),
        yaxis=ui.axis("predicted FLOP/s", type="log", **_ticks((min(ys), max(ys)))),
        margin={"l": 64, "r": 16, "t": 52, "b": 48},
    )
    body = ui.plot(
        "roofline-figure", 420, "FLOP/s of sections over their FLOPs per byte, below the roofs of the device"
    )
    return ui.Part("roofline", "Roofline", lead, body, {"roofline-figure": drawn})


def _ticks(ends: tuple[float, float]) -> dict[str, object]:
    """1, 2 and 5 of each power of ten between `ends`."""
    decades = range(floor(log10(ends[0])), ceil(log10(ends[1])) + 1)
    values = [digit * 10.0**power for power in decades for digit in (1, 2, 5)]
    return {"tickvals": values, "ticktext": [format_count(value).replace(".0 ", " ") for value in values]}


def _has_place(analysis: Analysis, fold: Fold) -> bool:
    load = analysis.step.sections[fold.numbers[0]].load
    return load.product_flops > 0 and load.traffic_bytes > 0


def _place(analysis: Analysis, fold: Fold) -> tuple[float, float]:
    section = analysis.step.sections[fold.numbers[0]]
    flops = section.load.product_flops
    return flops / section.load.traffic_bytes, flops / section.price.predicted_s


def _roof(name: str, roof: Roof, ends: tuple[float, float], line: dict[str, object]) -> ui.Trace:
    xs = [ends[0], roof.ridge, ends[1]]
    return ui.lines(name, xs, [roof.at(x) for x in xs], line=line, hoverinfo="skip")


def _points(analysis: Analysis, points: list[tuple[Fold, float, float]]) -> list[ui.Trace]:
    """The points of each bound, the largest first, so that smaller ones are not hidden."""
    traces: list[ui.Trace] = []
    for bound, colour in ui.BOUNDS.items():
        mine = [point for point in points if analysis.step.sections[point[0].numbers[0]].price.bound is bound]
        mine.sort(key=lambda point: -analysis.fold_s(point[0]))
        if not mine:
            continue
        shares = [analysis.fold_s(fold) / analysis.step.device_s for fold, _, _ in mine]
        sizes = [max(_LEAST_PX, _MOST_PX * share**0.5) for share in shares]
        style = {"color": colour, "size": sizes, "opacity": 0.8, "line": {"color": "white", "width": 1}}
        traces.append(
            ui.lines(
                bound_text(analysis.step, bound),
                [x for _, x, _ in mine],
                [y for _, _, y in mine],
                mode="markers",
                marker=style,
                customdata=[fold.numbers[0] for fold, _, _ in mine],
                meta=ui.Hover.ROOFLINE,
            )
        )
    return traces
