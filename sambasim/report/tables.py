"""Tables, defined once for the terminal, notebooks and HTML; JSON lines, CSV, and results of the Python API.

A column names a field of the rows, and the unit at the end of that name (`_s`, `_bytes`, `_share`) is the format.
"""

import csv
import io
import itertools
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from sambasim.bounded import printable
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


def text_of(name: str, value: object, plain: str = "") -> str:
    """The value of the field `name`. Text stays as it is, None is empty; a number without a unit has the format
    `plain`."""
    if isinstance(value, str) or value is None:
        return value or ""
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    if isinstance(value, int | float):
        return next((form(value) for unit, form in _FORMATS.items() if name.endswith(unit)), format(value, plain))
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


_LEAST_WORDS = 16
"""The narrowest that a column of words gets before columns of numbers are left out."""
_KEPT_NUMBERS = 3
_SEPARATOR, _EDGE = 1, 1


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text: a cell for each column, or none for a blank line. A terminal without room for all numbers gets no
    cut ones: the last columns of numbers are left out, and a line says so. Whole words are folded only if fewer than
    three columns of numbers had room."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    caption: str | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown, left_out = self, list[str]()
        while shown._width() > options.max_width and (numbers := shown._numbers()) and len(numbers) > 1:
            if len(numbers) <= _KEPT_NUMBERS and any(column.is_whole for column in shown.columns):
                shown = replace(shown, columns=[replace(column, is_whole=False) for column in shown.columns])
                continue
            left_out.insert(0, shown.columns[numbers[-1]].head)
            shown = shown._without(numbers[-1])
        yield shown._drawn()
        if left_out:
            yield Text(f"for a wider terminal: {', '.join(left_out)}")

    def _numbers(self) -> list[int]:
        return [number for number, column in enumerate(self.columns) if column.is_number]

    def _width(self) -> int:
        """Once its words are as narrow as can be."""
        total = _EDGE
        last = len(self.columns) - 1
        for number, column in enumerate(self.columns):
            texts = [column.head, *(row[number] for row in self.rows if row)]
            padding = (number > 0) + (number < last)
            width = padding + max(cell_len(line) for text in texts for line in printable(text).split("\n"))
            stays = column.is_number or column.is_whole
            total += _SEPARATOR + (width if stays else min(width, _LEAST_WORDS))
        return total

    def _without(self, number: int) -> "Table":
        def left(row: Sequence[str]) -> list[str]:
            return [cell for place, cell in enumerate(row) if place != number]

        columns = [column for place, column in enumerate(self.columns) if place != number]
        return replace(self, columns=columns, rows=[left(row) for row in self.rows])

    def _drawn(self) -> RichTable:
        heading = Text(printable(self.title), style="bold")
        drawn = RichTable(
            # rich wraps a title to the width of its table, and some tables are narrow.
            title=heading,
            title_justify="left",
            min_width=len(heading),
            show_header=any(column.head for column in self.columns),
            caption=self.caption,
            box=SIMPLE_HEAD,
            pad_edge=False,
        )
        for column in self.columns:
            justify: JustifyMethod = "right" if column.is_number else "left"
            no_wrap = column.is_number or column.is_whole
            drawn.add_column(column.head, justify=justify, overflow="fold", no_wrap=no_wrap)
        for row in self.rows:
            drawn.add_row(*(Text(printable(cell)) for cell in row))
        return drawn


def table(
    title: str, rows: Iterable[object], words: str, numbers: str = "", more: str = "", *, whole: Sequence[str] = ()
) -> Table:
    """A table of records or mappings. `words`, `numbers`, and `more` words behind them name the fields of its columns,
    with a comma between them; a heading other than the field's own follows a colon: `kind, in_bytes:read`. Words of the
    fields `whole` are not folded."""
    fields = [
        (*column.strip().partition(":"), is_number)
        for names, is_number in ((words, False), (numbers, True), (more, False))
        for column in (names.split(",") if names else ())
    ]
    columns = [
        Column(head if colon else title_of(name), is_number, name in whole) for name, colon, head, is_number in fields
    ]
    return Table(title, columns, [[text_of(name, _field(row, name)) for name, *_ in fields] for row in rows])


def _field(row: object, name: str) -> object:
    return row[name] if isinstance(row, Mapping) else getattr(row, name)


def text_table(title: str, words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of rows that are text already."""
    columns = [*(Column(head) for head in words), *(Column(head, is_number=True) for head in numbers)]
    return Table(title, columns, list(rows))


def labelled(rows: Iterable[tuple[str, str]], indent: str = "  ") -> RichTable:
    """Lines of a label and a text; what wraps stays beside its label."""
    grid = RichTable.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in rows:
        grid.add_row(Text(printable(f"{indent}{label}")), Text(printable(text)))
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
    def parts(self) -> Sequence[RenderableType]:
        """Text, and tables."""

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


_BLOCKS = "▁▂▃▄▅▆▇█"


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
