"""Terminal tables with rich, CSV, a log-log line chart as SVG; and results of the Python API in a notebook."""

import csv
import io
import itertools
import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import cycle
from xml.sax.saxutils import escape

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from sambasim.bounded import printable
from sambasim.units import format_rate

_LEAST_WORDS = 16
"""The narrowest that a column of words gets before columns of numbers are left out."""


class FittingTable(Table):
    """A table that leaves out its last columns of numbers where there is no room, and says so: cut numbers would be
    wrong ones. Words that should not be broken are, if else fewer than three columns of numbers had room."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, left_out = copy(self), list[str]()
        shown.columns = [*self.columns]
        while shown._excess(console, options) > 0 and (numbers := sum(map(_is_number, shown.columns))) > 1:
            if numbers <= _KEPT_NUMBERS and any(one.no_wrap and not _is_number(one) for one in shown.columns):
                shown.columns = [one if _is_number(one) else _foldable(one) for one in shown.columns]
                continue
            last = next(column for column in reversed(shown.columns) if _is_number(column))
            shown.columns.remove(last)
            left_out.insert(0, str(last.header))
        yield from Table.__rich_console__(shown, console, options)
        if left_out:
            yield Text(f"for a wider terminal: {', '.join(left_out)}")

    def _excess(self, console: Console, options: ConsoleOptions) -> int:
        """By how much it is wider than `options` allow, once its words are as narrow as can be."""
        wide = options.update(max_width=_ANY_WIDTH)
        widths = [(one.no_wrap, self._measure_column(console, wide, one).maximum) for one in self.columns]
        least = sum(width if is_whole else min(width, _LEAST_WORDS) for is_whole, width in widths)
        return least + self._extra_width - options.max_width


_ANY_WIDTH = 10_000
_KEPT_NUMBERS = 3


def _foldable(column: Column) -> Column:
    changed = copy(column)
    changed.no_wrap = False
    return changed


def _is_number(column: Column) -> bool:
    return column.justify == "right"


def plain_table(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    """An empty table. Columns of `words` are left-aligned, those of `numbers` right-aligned."""
    heading = Text(printable(title), style="bold")
    # rich wraps a title to the width of its table, and some tables are narrow.
    table = FittingTable(title=heading, title_justify="left", min_width=len(heading), box=SIMPLE_HEAD, pad_edge=False)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def labelled(rows: Iterable[tuple[str, str]]) -> Table:
    """Lines of a label and a text; what wraps stays beside its label."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        add_row(grid, f"  {label}", text)
    return grid


def add_row(table: Table, *cells: str) -> None:
    """Add a row whose cells are never parsed as markup."""
    table.add_row(*(Text(printable(cell)) for cell in cells))


def json_line(fields: Mapping[str, object]) -> str:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


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


_PRE = '<pre style="line-height:normal;white-space:pre;overflow-x:auto">{code}</pre>'
_HTML_WIDTH, _LEAST_WIDTH = 120, 40
_BLOCKS = "▁▂▃▄▅▆▇█"


class Shown(ABC):
    """A result that is shown as its `parts`, text and tables."""

    @abstractmethod
    def parts(self) -> Sequence[RenderableType]:
        """Text, and tables of rich."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for part in self.parts():
            yield printable(part) if isinstance(part, str) else part

    def __str__(self) -> str:
        text = io.StringIO()
        width = max(_LEAST_WIDTH, shutil.get_terminal_size().columns)
        _console(text, width, record=False).print(self, markup=False)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def _repr_html_(self) -> str:
        console = _console(io.StringIO(), _HTML_WIDTH, record=True)
        console.print(self, markup=False)
        return console.export_html(inline_styles=True, code_format=_PRE)


def _console(text: io.StringIO, width: int, *, record: bool) -> Console:
    """A console of plain text, whatever the environment says. In a notebook, rich would display and not write."""
    return Console(
        file=text,
        width=width,
        record=record,
        force_terminal=False,
        force_jupyter=False,
        color_system=None,
        highlight=False,
    )


class Tables(Shown):
    """Tables, and the `record` that they show."""

    def __init__(self, parts: Sequence[RenderableType], record: object) -> None:
        self._parts = parts
        self.record = record

    def parts(self) -> Sequence[RenderableType]:
        return self._parts

    def __repr__(self) -> str:
        return str(self)


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The course of `values` as one line of blocks, the means of at most `width` equal parts."""
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return ""
    parts = min(width, len(finite))
    edges = [len(finite) * part // parts for part in range(parts + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    least, most = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (most - least) if most > least else 0.0
    return "".join(_BLOCKS[round((mean - least) * scale)] for mean in means)
