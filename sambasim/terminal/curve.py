"""The course of a run's losses in a notebook."""

import sys
from typing import TYPE_CHECKING

from sambasim.report.tables import Shown, sparkline

if TYPE_CHECKING:
    from rich.console import RenderableType


class Curve(Shown):
    """One output of a notebook, which is replaced: a line, and the course of the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._line, self._evaluation, self._output = "", "", None

    def show(self, line: str) -> None:
        self._line = line
        if self._output is None:
            self._output = sys.modules["IPython"].display.display(self, display_id=True)
        else:
            self._output.update(self)

    def evaluated(self, line: str) -> None:
        self._evaluation = f"\n{line}"
        self.show(self._line)

    def parts(self) -> "list[RenderableType]":
        return [f"{self._line}\nloss {sparkline(self.losses)}{self._evaluation}"]
