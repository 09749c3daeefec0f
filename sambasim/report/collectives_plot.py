"""The times of `sambasim bench collectives` over size, as an SVG: both axes logarithmic, a line a path."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from sambasim.records.collectives import CollectivesRecord
from sambasim.units import format_bytes, format_seconds

_WIDTH, _HEIGHT = 800, 500
_LEFT, _TOP, _BOTTOM = 80, 50, 60
_LABEL_GAP = 15
_LABEL_INDENT = 8
_CHARACTER_WIDTH = 7
"""No less than what a character of a label takes on average: a sans-serif's lower case has half its size of 12."""
_COPY = "copy bound"
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Okabe and Ito's, which readers who do not see all colours tell apart."""
_COPY_COLOUR = "#555555"


@dataclass(frozen=True, slots=True)
class _Line:
    """`points` are (bytes, seconds), in ascending order of bytes."""

    name: str
    colour: str
    points: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where a value lies between `start` and `stop`, in pixels, if their logarithms are spread evenly."""

    least: float
    most: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        return self.start + (self.stop - self.start) * math.log(value / self.least) / math.log(self.most / self.least)


def collectives_plot(record: CollectivesRecord) -> str:
    """An SVG document. A record without sizes gives one without lines."""
    lines = _lines(record)
    sizes = [size for line in lines for size, _ in line.points] or [1]
    times_s = [time_s for line in lines for _, time_s in line.points] or [1.0]
    decades = range(math.floor(math.log10(min(times_s))), math.ceil(math.log10(max(times_s))) + 1)
    # A single size, or a time that is a power of ten, still wants an axis with a length.
    x = _Axis(min(sizes), max(max(sizes), 2 * min(sizes)), _LEFT, _WIDTH - _label_width(lines))
    y = _Axis(10.0 ** decades[0], 10.0 ** max(decades[-1], decades[0] + 1), _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 25, f"all-reduce, measured: {record.world_size} ranks, {record.mpi}", "start", size=15),
        *_horizontal_axis(x, sorted(set(sizes))),
        *_vertical_axis(x, y, [10.0**decade for decade in decades]),
        *_drawn(lines, x, y),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _lines(record: CollectivesRecord) -> list[_Line]:
    names = list(dict.fromkeys(path.path for size in record.sizes for path in size.paths))
    lines = [
        _Line(
            name,
            _COLOURS[index % len(_COLOURS)],
            [(size.size_bytes, path.measured_s) for size in record.sizes for path in size.paths if path.path == name],
        )
        for index, name in enumerate(names)
    ]
    bound = [(size.size_bytes, size.copy_bound_s) for size in record.sizes]
    return [*lines, _Line(_COPY, _COPY_COLOUR, bound)] if bound else []


def _label_width(lines: Sequence[_Line]) -> int:
    """Pixels to the right of the axes, in which the names of the lines find room."""
    return 2 * _LABEL_INDENT + _CHARACTER_WIDTH * max((len(line.name) for line in lines), default=0)


def _horizontal_axis(x: _Axis, sizes: Sequence[int]) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    parts = [_rule(x.start, bottom, x.stop, bottom, "#000000")]
    for size in sizes:
        parts.append(_rule(x.at(size), bottom, x.at(size), bottom + 5, "#000000"))
        parts.append(_text(x.at(size), bottom + 20, format_bytes(size).replace(".0 ", " ")))
    return [*parts, _text((x.start + x.stop) / 2, _HEIGHT - 15, "size of the buffer, bytes")]


def _vertical_axis(x: _Axis, y: _Axis, times_s: Sequence[float]) -> list[str]:
    parts = []
    for time_s in times_s:
        parts.append(_rule(x.start, y.at(time_s), x.stop, y.at(time_s), "#dddddd"))
        label = format_seconds(time_s).replace(".0 ", " ").replace(".00 ", " ")
        parts.append(_text(_LEFT - 8, y.at(time_s) + 4, label, "end"))
    middle = (y.start + y.stop) / 2
    title = _text(20, middle, "time, seconds", turn=f' transform="rotate(-90 20 {middle:.1f})"')
    return [*parts, _rule(_LEFT, y.start, _LEFT, y.stop, "#000000"), title]


def _drawn(lines: Sequence[_Line], x: _Axis, y: _Axis) -> list[str]:
    """The lines, and at the end of each its name; names that would lie over each other are moved apart."""
    parts, lowest = [], -math.inf
    for line in sorted(lines, key=lambda line: y.at(line.points[-1][1])):
        path = " ".join(f"{x.at(size):.1f},{y.at(time_s):.1f}" for size, time_s in line.points)
        dashes = ' stroke-dasharray="6 4"' if line.name == _COPY else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dashes}/>')
        parts += [
            f'<circle cx="{x.at(size):.1f}" cy="{y.at(time_s):.1f}" r="3" fill="{line.colour}"/>'
            for size, time_s in line.points
        ]
        last_size, last_s = line.points[-1]
        lowest = max(y.at(last_s) + 4, lowest + _LABEL_GAP)
        parts.append(_text(x.at(last_size) + _LABEL_INDENT, lowest, line.name, "start", colour=line.colour))
    return parts


def _rule(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _text(
    x: float, y: float, words: str, anchor: str = "middle", *, size: int = 12, colour: str = "#000000", turn: str = ""
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}{turn}>{escape(words)}</text>"
