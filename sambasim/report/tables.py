"""Tables, defined once for the terminal, notebooks and HTML; JSON lines, CSV, results of the Python API, and log-log
line charts as SVG.

A column names a field of the rows, and the unit at the end of that name (`_s`, `_bytes`, `_share`) is the format.
"""

import csv
import html
import io
import itertools
import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from sambasim.errors import printable
from sambasim.units import format_bytes, format_count, format_rate, format_seconds

_FORMATS: Mapping[str, Callable[[float], str]] = {
    "_flops_per_s": lambda value: f"{format_count(value)}FLOP/s",
    "_bytes_per_s": lambda value: f"{format_count(value)}B/s",
    "samples_per_s": format_rate,
    "_bytes": format_bytes,
    "_s": format_seconds,
    "_s_per_section": format_seconds,
    "_share": "{:.1%}".format,
    "predicted_efficiency": "{:.1%}".format,
    "elements": format_count,
}
"""By the end of a name; the first that fits."""


class Row(BaseModel):
    """What is reported: attributes, keys in JSON. JSON has no infinity, and "Infinity" is clearer than null."""

    model_config = ConfigDict(extra="allow", frozen=True, ser_json_inf_nan="strings")

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def text_of(name: str, value: object, plain: str = "") -> str:
    """The value of the field `name`. None is empty; a number without a unit has the format `plain`."""
    match value:
        case None:
            return ""
        case int() | float():
            return next((form(value) for unit, form in _FORMATS.items() if name.endswith(unit)), format(value, plain))
        case tuple() | list():
            return ", ".join(map(str, value))
    return str(value)


def title_of(name: str) -> str:
    """A field's name without its unit: `hbm bandwidth` for `hbm_bandwidth_bytes_per_s`."""
    for unit in ("_bytes_per_s", "_flops_per_s", "_bytes", "_s"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


@dataclass(frozen=True, slots=True)
class Column:
    """Words are left-aligned and folded where there is no room, unless they are `whole`; numbers are right-aligned."""

    head: str
    is_number: bool = False
    is_whole: bool = False


_LEAST_WORDS = 16  # the narrowest that a column of words gets before columns of numbers are left out
_KEPT_NUMBERS = 3


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text: a cell for each column, or none for a blank line. Where numbers have no room, the last columns of
    them are left out; whole words are folded if fewer than three would have room."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    caption: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, left_out = self, list[str]()
        while shown._width() > options.max_width:
            numbers = [place for place, column in enumerate(shown.columns) if column.is_number]
            if len(numbers) < 2:
                break
            if len(numbers) <= _KEPT_NUMBERS and any(column.is_whole for column in shown.columns):
                shown = replace(shown, columns=[replace(column, is_whole=False) for column in shown.columns])
                continue
            last = numbers[-1]
            left_out.insert(0, shown.columns[last].head)
            rows = [[*row[:last], *row[last + 1 :]] for row in shown.rows]
            shown = replace(shown, columns=[*shown.columns[:last], *shown.columns[last + 1 :]], rows=rows)
        yield shown._drawn()
        if left_out:
            yield Text(f"for a wider terminal: {', '.join(left_out)}")

    def _width(self) -> int:
        """Once its words are as narrow as can be: with an edge, and a separator and padding for each column."""
        total, last = 1, len(self.columns) - 1
        for number, column in enumerate(self.columns):
            texts = [column.head, *(row[number] for row in self.rows if row)]
            longest = max(cell_len(line) for text in texts for line in printable(text).split("\n"))
            width = longest + (number > 0) + (number < last)
            total += 1 + (width if column.is_number or column.is_whole else min(width, _LEAST_WORDS))
        return total

    def _drawn(self) -> RichTable:
        heading, has_heads = Text(printable(self.title), style="bold"), any(column.head for column in self.columns)
        drawn = RichTable(title=heading, title_justify="left", show_header=has_heads, box=SIMPLE_HEAD, pad_edge=False)
        drawn.caption, drawn.min_width = self.caption, len(heading)  # rich wraps a title to the width of its table
        for column in self.columns:
            no_wrap = column.is_number or column.is_whole
            justify: JustifyMethod = "right" if column.is_number else "left"
            drawn.add_column(column.head, justify=justify, overflow="fold", no_wrap=no_wrap)
        for row in self.rows:
            drawn.add_row(*(Text(printable(cell)) for cell in row))
        return drawn


def table(
    title: str, rows: Iterable[object], words: str, numbers: str = "", more: str = "", *, whole: Sequence[str] = ()
) -> Table:
    """A table of records or mappings. `words`, `numbers`, and `more` words name the fields of its columns; a heading
    other than the field's own follows a colon: `kind, in_bytes:read`. Fields `whole` are not folded."""
    columns: dict[str, Column] = {}
    for group, is_number in ((words, False), (numbers, True), (more, False)):
        for column in filter(None, group.split(",")):
            name, colon, head = column.strip().partition(":")
            columns[name] = Column(head if colon else title_of(name), is_number, name in whole)

    def cells(row: object) -> list[str]:
        field = row.__getitem__ if isinstance(row, Mapping) else partial(getattr, row)
        return [text_of(name, field(name)) for name in columns]

    return Table(title, list(columns.values()), list(map(cells, rows)))


def text_table(title: str, words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    return Table(title, [*map(Column, words), *(Column(head, is_number=True) for head in numbers)], list(rows))


def labelled(rows: Iterable[tuple[str, str]]) -> RichTable:
    """Lines of a label and a text; what wraps stays beside its label."""
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(Text(printable(f"  {label}")), Text(printable(text)))
    return grid


def json_line(fields: Mapping[str, object]) -> str:
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":"))


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


_PRE = '<pre style="line-height:normal;white-space:pre;overflow-x:auto">{code}</pre>'
_HTML_WIDTH, _LEAST_WIDTH = 120, 40


class Shown(ABC):
    """A result that is shown as its `parts`, text and tables."""

    @abstractmethod
    def parts(self) -> Sequence[RenderableType]: ...

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for part in self.parts():
            yield printable(part) if isinstance(part, str) else part

    def __str__(self) -> str:
        return self.text(max(_LEAST_WIDTH, shutil.get_terminal_size().columns))

    def text(self, width: int) -> str:
        return "\n".join(line.rstrip() for line in self._printed(width).export_text().splitlines())

    def _repr_html_(self) -> str:
        return self._printed(_HTML_WIDTH).export_html(inline_styles=True, code_format=_PRE)

    def _printed(self, width: int) -> Console:
        """A console of plain text, whatever the environment says. In a notebook, rich would display and not write."""
        how: dict[str, Any] = {"force_terminal": False, "force_jupyter": False, "color_system": None}
        console = Console(file=io.StringIO(), width=width, record=True, highlight=False, **how)
        console.print(self, markup=False)
        return console


class Tables(Shown):
    def __init__(self, parts: Sequence[RenderableType], record: object) -> None:
        self._parts = parts
        self.record = record

    def parts(self) -> Sequence[RenderableType]:
        return self._parts

    def __repr__(self) -> str:
        return str(self)


_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """The course of `values` as one line of blocks, the means of at most `width` equal parts."""
    finite = [value for value in values if abs(value) < math.inf]
    if not finite:
        return ""
    parts = min(width, len(finite))
    edges = [len(finite) * part // parts for part in range(parts + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    least, most = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (most - least) if most > least else 0.0
    return "".join(_BLOCKS[round((mean - least) * scale)] for mean in means)


_WIDTH, _HEIGHT = 800, 500
_LEFT, _TOP, _FOOT = 80, 50, 440
_LABEL_GAP, _LABEL_INDENT = 15, 8
_CHARACTER_WIDTH = 7  # at least the average width of a label's character: about half the font size of 12
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # Okabe and Ito, colour-blind safe
_BOUND_COLOUR = "#555555"


@dataclass(frozen=True, slots=True)
class Curve:
    """`points` are (x, y), both positive, in ascending order of x. A bound is drawn grey and dashed."""

    name: str
    points: Sequence[tuple[float, float]]
    is_bound: bool = False


def _axis(least: float, most: float, start: float, stop: float) -> Callable[[float], float]:
    """Where a value is, on a logarithmic axis from `least` at `start` to `most` at `stop`."""
    return lambda value: start + (stop - start) * math.log(value / least) / math.log(most / least)


def log_chart(
    title: str, titles: tuple[str, str], words: tuple[Callable[[float], str], ...], curves: Sequence[Curve]
) -> str:
    """`titles` of the axes x and y, and the `words` of their values."""
    curves = [curve for curve in curves if curve.points]
    xs = sorted({x for curve in curves for x, _ in curve.points}) or [1.0]
    ys = [y for curve in curves for _, y in curve.points] or [1.0]
    decades = [10.0**power for power in range(math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys))) + 1)]
    labels = 2 * _LABEL_INDENT + _CHARACTER_WIDTH * max((len(curve.name) for curve in curves), default=0)
    right, middle = _WIDTH - labels, (_FOOT + _TOP) / 2
    # With a single point, or a single power of ten, the axis must still have a length.
    x = _axis(xs[0], max(xs[-1], 2 * xs[0]), _LEFT, right)
    y = _axis(decades[0], max(decades[-1], 10 * decades[0]), _FOOT, _TOP)
    size = f'width="{_WIDTH}" height="{_HEIGHT}"'
    view = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
    parts = [f'<svg {view} {size} font-family="sans-serif" font-size="12">', f'<rect {size} fill="white"/>']
    parts += [_svg_text(_LEFT, 25, title, "start", size=15), _svg_line(_LEFT, _FOOT, right, _FOOT)]
    for value in xs:
        at = x(value)
        parts += [_svg_line(at, _FOOT, at, _FOOT + 5), _svg_text(at, _FOOT + 20, words[0](value))]
    parts.append(_svg_text((_LEFT + right) / 2, _HEIGHT - 15, titles[0]))
    for value in decades:
        at = y(value)
        parts += [_svg_line(_LEFT, at, right, at, "#dddddd"), _svg_text(_LEFT - 8, at + 4, words[1](value), "end")]
    turned = f' transform="rotate(-90 20 {middle:.1f})"'
    parts += [_svg_line(_LEFT, _FOOT, _LEFT, _TOP), _svg_text(20, middle, titles[1], turn=turned)]
    return "\n".join([*parts, *_curves_svg(curves, x, y), "</svg>"]) + "\n"


def _curves_svg(curves: Sequence[Curve], x: Callable[[float], float], y: Callable[[float], float]) -> Iterator[str]:
    """The curves with their names at the right end, from top to bottom, moved down where they would overlap."""
    colours, label_y = itertools.cycle(_COLOURS), -math.inf
    coloured = [(curve, _BOUND_COLOUR if curve.is_bound else next(colours)) for curve in curves]
    for curve, colour in sorted(coloured, key=lambda pair: y(pair[0].points[-1][1])):
        points = [(x(a), y(b)) for a, b in curve.points]
        path = " ".join(f"{cx:.1f},{cy:.1f}" for cx, cy in points)
        dashes = ' stroke-dasharray="6 4"' if curve.is_bound else ""
        yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
        yield from (f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3" fill="{colour}"/>' for cx, cy in points)
        last_x, last_y = points[-1]
        label_y = max(last_y + 4, label_y + _LABEL_GAP)
        yield _svg_text(last_x + _LABEL_INDENT, label_y, curve.name, "start", colour=colour)


def _svg_line(x1: float, y1: float, x2: float, y2: float, colour: str = "#000000") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _svg_text(
    x: float, y: float, words: str, anchor: str = "middle", *, size: int = 12, colour: str = "#000000", turn: str = ""
) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"'
    return f"<text {place}{turn}>{html.escape(words, quote=False)}</text>"
