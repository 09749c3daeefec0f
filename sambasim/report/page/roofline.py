"""The predicted part that compares sections with the roofs of the device."""

from math import ceil, floor, log10

from sambasim.report.findings import Findings
from sambasim.report.headline import Roof, published, reachable, roofs_text
from sambasim.report.page import ui
from sambasim.report.simulation import bound_text
from sambasim.simulation.folds import Fold
from sambasim.units import counted, format_count

_LEAST_PX, _MOST_PX = 7, 44
_MARGIN = 2.0
"""The axes go on by this factor beyond the points and the ridge."""


def roofline(found: Findings) -> ui.Part:
    points = [(fold, *_place(found, fold)) for fold in found.folds if _has_place(found, fold)]
    without = sum(len(fold.numbers) for fold in found.folds if not _has_place(found, fold))
    lead = (
        "A point is a section, or equal sections of repeated layers: its FLOPs per byte of traffic, and its FLOP/s; "
        "its area is its share of the device time, its colour its bound. The lines are what the tiles in use "
        f"can do at most: {roofs_text(found.prediction)}. A click on a point shows its section further down."
    )
    if without:
        lead += (
            f" {counted(without, 'section')} without products or traffic, such as updates, {_are(without)} not drawn."
        )
    if not points:
        return ui.Part("roofline", "Roofline", lead, ui.joined())
    reach, peak = reachable(found.prediction), published(found.prediction)
    xs = [x for _, x, _ in points] + [reach.ridge, peak.ridge]
    ends = (min(xs) / _MARGIN, max(xs) * _MARGIN)
    ys = [*(y for _, _, y in points), peak.flops_per_s]
    traces = [
        _roof("published", peak, ends, {"color": ui.GREY, "width": 1.5, "dash": "dash"}),
        _roof("reachable", reach, ends, {"color": ui.INK, "width": 2}),
        *_points(found, points),
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


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _has_place(found: Findings, fold: Fold) -> bool:
    load = found.step.sections[fold.numbers[0]].load
    return load.product_flops > 0 and load.traffic_bytes > 0


def _place(found: Findings, fold: Fold) -> tuple[float, float]:
    section = found.step.sections[fold.numbers[0]]
    flops = section.load.product_flops
    return flops / section.load.traffic_bytes, flops / section.price.predicted_s


def _roof(name: str, roof: Roof, ends: tuple[float, float], line: dict[str, object]) -> ui.Trace:
    xs = [ends[0], roof.ridge, ends[1]]
    return ui.lines(name, xs, [roof.at(x) for x in xs], line=line, hoverinfo="skip")


def _points(found: Findings, points: list[tuple[Fold, float, float]]) -> list[ui.Trace]:
    """The points of each bound, the largest first, so that smaller ones are not hidden."""
    traces: list[ui.Trace] = []
    for bound, colour in ui.BOUNDS.items():
        mine = [point for point in points if found.step.sections[point[0].numbers[0]].price.bound is bound]
        mine.sort(key=lambda point: -found.fold_s(point[0]))
        if not mine:
            continue
        shares = [found.fold_s(fold) / found.step.device_s for fold, _, _ in mine]
        sizes = [max(_LEAST_PX, _MOST_PX * share**0.5) for share in shares]
        style = {"color": colour, "size": sizes, "opacity": 0.8, "line": {"color": "white", "width": 1}}
        traces.append(
            ui.lines(
                bound_text(found.step, bound),
                [x for _, x, _ in mine],
                [y for _, _, y in mine],
                mode="markers",
                marker=style,
                customdata=[fold.numbers[0] for fold, _, _ in mine],
                meta=ui.Hover.ROOFLINE,
            )
        )
    return traces
