"""Log-log line charts as SVG."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from xml.sax.saxutils import escape

from sambasim.units import format_rate

_WIDTH, _HEIGHT = 800, 500
_LEFT, _TOP, _BOTTOM = 80, 50, 60
_LABEL_GAP = 15
_LABEL_INDENT = 8
_CHARACTER_WIDTH = 7
"""At least the average width of a label's character: about half the font size of 12 in a sans-serif."""
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""The colour-blind safe palette of Okabe and Ito."""
_BOUND_COLOUR = "#555555"


@dataclass(frozen=True, slots=True)
class Curve:
    """`points` are (x, y), both positive, in ascending order of x. A bound is drawn grey and dashed."""

    name: str
    points: Sequence[tuple[float, float]]
    is_bound: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    title: str
    x_title: str
    y_title: str
    x_words: Callable[[float], str]
    y_words: Callable[[float], str]
    curves: Sequence[Curve]


@dataclass(frozen=True, slots=True)
class _Axis:
    least: float
    most: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        return self.start + (self.stop - self.start) * math.log(value / self.least) / math.log(self.most / self.least)


def speed_chart(title: str, x_title: str, curves: Sequence[Curve]) -> str:
    """Predicted samples/s over a number of ranks or replicas as an SVG."""
    return log_chart(
        Chart(
            title=f"{title}: predicted, not measured",
            x_title=x_title,
            y_title="samples per second",
            x_words=lambda count: f"{count:.0f}",
            y_words=format_rate,
            curves=curves,
        )
    )


def log_chart(chart: Chart) -> str:
    curves = [curve for curve in chart.curves if curve.points]
    xs = sorted({x for curve in curves for x, _ in curve.points}) or [1.0]
    ys = [y for curve in curves for _, y in curve.points] or [1.0]
    decades = range(math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys))) + 1)
    # With a single point, or a single power of ten, the axis must still have a length.
    labels = 2 * _LABEL_INDENT + _CHARACTER_WIDTH * max((len(curve.name) for curve in curves), default=0)
    x = _Axis(xs[0], max(xs[-1], 2 * xs[0]), _LEFT, _WIDTH - labels)
    y = _Axis(10.0 ** decades[0], 10.0 ** max(decades[-1], decades[0] + 1), _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _svg_text(_LEFT, 25, chart.title, "start", size=15),
        *_horizontal_axis(chart, x, xs),
        *_vertical_axis(chart, x, y, [10.0**decade for decade in decades]),
        *_curves_svg(curves, x, y),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _horizontal_axis(chart: Chart, x: _Axis, values: Sequence[float]) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    parts = [_svg_line(x.start, bottom, x.stop, bottom, "#000000")]
    for value in values:
        parts.append(_svg_line(x.at(value), bottom, x.at(value), bottom + 5, "#000000"))
        parts.append(_svg_text(x.at(value), bottom + 20, chart.x_words(value)))
    return [*parts, _svg_text((x.start + x.stop) / 2, _HEIGHT - 15, chart.x_title)]


def _vertical_axis(chart: Chart, x: _Axis, y: _Axis, values: Sequence[float]) -> list[str]:
    parts = []
    for value in values:
        parts.append(_svg_line(x.start, y.at(value), x.stop, y.at(value), "#dddddd"))
        parts.append(_svg_text(_LEFT - 8, y.at(value) + 4, chart.y_words(value), "end"))
    middle = (y.start + y.stop) / 2
    title = _svg_text(20, middle, chart.y_title, turn=f' transform="rotate(-90 20 {middle:.1f})"')
    return [*parts, _svg_line(_LEFT, y.start, _LEFT, y.stop, "#000000"), title]


def _curves_svg(curves: Sequence[Curve], x: _Axis, y: _Axis) -> list[str]:
    """The curves with their names at the right end, from top to bottom, moved down where they would overlap."""
    colours = cycle(_COLOURS)
    coloured = [(curve, _BOUND_COLOUR if curve.is_bound else next(colours)) for curve in curves]
    parts, label_y = [], -math.inf
    for curve, colour in sorted(coloured, key=lambda pair: y.at(pair[0].points[-1][1])):
        points = [(x.at(a), y.at(b)) for a, b in curve.points]
        path = " ".join(f"{cx:.1f},{cy:.1f}" for cx, cy in points)
        dashes = ' stroke-dasharray="6 4"' if curve.is_bound else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        parts += [f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3" fill="{colour}"/>' for cx, cy in points]
        last_x, last_y = points[-1]
        label_y = max(last_y + 4, label_y + _LABEL_GAP)
        parts.append(_svg_text(last_x + _LABEL_INDENT, label_y, curve.name, "start", colour=colour))
    return parts


def _svg_line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _svg_text(
    x: float, y: float, words: str, anchor: str = "middle", *, size: int = 12, colour: str = "#000000", turn: str = ""
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}{turn}>{escape(words)}</text>"
