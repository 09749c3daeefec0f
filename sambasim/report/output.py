"""The table of before, for modules that are moved to `tables`."""

from collections.abc import Iterable
from copy import copy

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

from sambasim.bounded import printable
from sambasim.report.svg import Curve as Curve
from sambasim.report.svg import speed_chart as speed_chart
from sambasim.report.tables import csv_text as csv_text
from sambasim.report.tables import json_line as json_line
from sambasim.report.tables import labelled as labelled

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


def add_row(table: Table, *cells: str) -> None:
    """Add a row whose cells are never parsed as markup."""
    table.add_row(*(Text(printable(cell)) for cell in cells))
