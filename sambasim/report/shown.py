"""Results of the Python API as tables: on a terminal, by `rich.print`, and as HTML in a notebook."""

import io
import itertools
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType

from sambasim.bounded import printable

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
