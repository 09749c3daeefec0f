"""Curves over axes that are both logarithmic, as an SVG."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 800, 500
_LEFT, _TOP, _BOTTOM = 80, 50, 60
_LABEL_GAP = 15
_LABEL_INDENT = 8
_CHARACTER_WIDTH = 7
"""No less than what a character of a label takes on average: a sans-serif's lower case has half its size of 12."""
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Okabe and Ito's, which readers who do not see all colours tell apart."""
_BOUND_COLOUR = "#555555"


@dataclass(frozen=True, slots=True)
class Curve:
    """`points` are (x, y), both above 0, in ascending order of x. A bound is drawn grey and dashed."""

    name: str
    points: Sequence[tuple[float, float]]
    is_bound: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A title, titles of the axes, and how a value on an axis reads. Curves without points are not drawn."""

    title: str
    x_title: str
    y_title: str
    x_words: Callable[[float], str]
    y_words: Callable[[float], str]
    curves: Sequence[Curve]


@dataclass(frozen=True, slots=True)
class _Line:
    """A curve with its colour."""

    name: str
    colour: str
    points: Sequence[tuple[float, float]]
    dashes: str


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where a value lies between `start` and `stop`, in pixels, if their logarithms are spread evenly."""

    least: float
    most: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        return self.start + (self.stop - self.start) * math.log(value / self.least) / math.log(self.most / self.least)


def log_chart(chart: Chart) -> str:
    """An SVG document. A chart without points gives one without lines."""
    lines = _lines(chart)
    xs = sorted({x for line in lines for x, _ in line.points}) or [1.0]
    ys = [y for line in lines for _, y in line.points] or [1.0]
    decades = range(math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys))) + 1)
    # A single point, or a value that is a power of ten, still wants an axis with a length.
    x = _Axis(xs[0], max(xs[-1], 2 * xs[0]), _LEFT, _WIDTH - _label_width(lines))
    y = _Axis(10.0 ** decades[0], 10.0 ** max(decades[-1], decades[0] + 1), _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 25, chart.title, "start", size=15),
        *_horizontal_axis(chart, x, xs),
        *_vertical_axis(chart, x, y, [10.0**decade for decade in decades]),
        *_drawn(lines, x, y),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _lines(chart: Chart) -> list[_Line]:
    colours = iter(_COLOURS * (1 + len(chart.curves) // len(_COLOURS)))
    return [
        _Line(
            curve.name,
            _BOUND_COLOUR if curve.is_bound else next(colours),
            curve.points,
            ' stroke-dasharray="6 4"' if curve.is_bound else "",
        )
        for curve in chart.curves
        if curve.points
    ]


def _label_width(lines: Sequence[_Line]) -> int:
    """Pixels to the right of the axes, in which the names of the lines find room."""
    return 2 * _LABEL_INDENT + _CHARACTER_WIDTH * max((len(line.name) for line in lines), default=0)


def _horizontal_axis(chart: Chart, x: _Axis, values: Sequence[float]) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    parts = [_rule(x.start, bottom, x.stop, bottom, "#000000")]
    for value in values:
        parts.append(_rule(x.at(value), bottom, x.at(value), bottom + 5, "#000000"))
        parts.append(_text(x.at(value), bottom + 20, chart.x_words(value)))
    return [*parts, _text((x.start + x.stop) / 2, _HEIGHT - 15, chart.x_title)]


def _vertical_axis(chart: Chart, x: _Axis, y: _Axis, values: Sequence[float]) -> list[str]:
    parts = []
    for value in values:
        parts.append(_rule(x.start, y.at(value), x.stop, y.at(value), "#dddddd"))
        parts.append(_text(_LEFT - 8, y.at(value) + 4, chart.y_words(value), "end"))
    middle = (y.start + y.stop) / 2
    title = _text(20, middle, chart.y_title, turn=f' transform="rotate(-90 20 {middle:.1f})"')
    return [*parts, _rule(_LEFT, y.start, _LEFT, y.stop, "#000000"), title]


def _drawn(lines: Sequence[_Line], x: _Axis, y: _Axis) -> list[str]:
    """The lines, and at the end of each its name; names that would lie over each other are moved apart."""
    parts, lowest = [], -math.inf
    for line in sorted(lines, key=lambda line: y.at(line.points[-1][1])):
        path = " ".join(f"{x.at(one):.1f},{y.at(other):.1f}" for one, other in line.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{line.dashes}/>')
        parts += [
            f'<circle cx="{x.at(one):.1f}" cy="{y.at(other):.1f}" r="3" fill="{line.colour}"/>'
            for one, other in line.points
        ]
        last_x, last_y = line.points[-1]
        lowest = max(y.at(last_y) + 4, lowest + _LABEL_GAP)
        parts.append(_text(x.at(last_x) + _LABEL_INDENT, lowest, line.name, "start", colour=line.colour))
    return parts


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(
    x: float, y: float, words: str, anchor: str = "middle", *, size: int = 12, colour: str = "#000000", turn: str = ""
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}{turn}>{escape(words)}</text>"
