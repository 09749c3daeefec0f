"""How tables look: a heading, words to the left, numbers to the right."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text


def plain_table(title: str, words: Iterable[str], numbers: Iterable[str]) -> Table:
    """An empty table with columns of these names."""
    heading = Text(printable(title), style="bold")
    # A title is wrapped to its table, and some tables are narrow.
    table = Table(title=heading, title_justify="left", min_width=len(heading), box=SIMPLE_HEAD, pad_edge=False)
    for name in words:
        table.add_column(name, overflow="fold")
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def add_row(table: Table, *cells: str) -> None:
    """Text and not str: a cell from a file is never markup."""
    table.add_row(*(Text(printable(cell)) for cell in cells))


def printable(text: str) -> str:
    """Without what would move the cursor of the reader's terminal; line breaks stay."""
    return "".join(character if character.isprintable() or character == "\n" else "?" for character in text)
