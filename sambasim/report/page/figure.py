"""Figures as plotly's JSON. The only file that knows plotly, which checks each of them."""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TypeAlias

import plotly.graph_objects
import plotly.offline

from sambasim.report.page.html import Html
from sambasim.report.page.palette import HAIRLINE, INK

Trace: TypeAlias = Mapping[str, object]
Figure: TypeAlias = Mapping[str, object]

_FONT = {"family": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif", "size": 12, "color": INK}
_AXIS = {"gridcolor": HAIRLINE, "linecolor": "#8b949e", "zeroline": False, "ticks": "outside", "tickcolor": "#8b949e"}


_MOST_APART = 150
"""Bars in the width of the page, between which there is room for white."""


class Hover(StrEnum):
    """What the script of the page tells where the pointer is, from `customdata` of the trace: numbers of sections, and
    names of what is none. Texts for each point would be most of the page."""

    SECTIONS = "sections"
    SPANS = "spans"
    MEMORY = "memory"


LEGEND = {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "xanchor": "left"}
"""Above the figure, to the left."""

SECONDS = {"ticksuffix": "s", "exponentformat": "SI", "minexponent": 0, "rangemode": "tozero"}
"""An axis of seconds: 5ms, 200μs."""


def bars(count: int, gap: float) -> tuple[dict[str, object], float]:
    """The edge and the gap of `count` bars side by side: none of either where so many would leave nothing of them."""
    return ({"color": "white", "width": 0.5}, gap) if count <= _MOST_APART else ({"width": 0}, 0.0)


def plotly_script() -> Html:
    """The library itself, as it is inlined. It writes no `</script`."""
    return Html(str(plotly.offline.get_plotlyjs()))


def figure(traces: Sequence[Trace], **layout: object) -> Figure:
    """`traces` on `layout`, in the look of the page. Raises ValueError for what plotly does not know."""
    look = {
        "template": {},
        "font": _FONT,
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "margin": {"l": 64, "r": 16, "t": 34, "b": 44},
        "hoverlabel": {"align": "left", "bgcolor": "white", "bordercolor": "#8b949e", "font": _FONT},
        "legend": LEGEND,
        "dragmode": "zoom",
    }
    drawn = plotly.graph_objects.Figure(data=list(map(dict, traces)), layout=look | layout)
    checked: Figure = json.loads(drawn.to_json())
    return checked


def axis(title: str, **more: object) -> dict[str, object]:
    """An axis in the look of the page."""
    return {**_AXIS, "title": {"text": title, "font": _FONT, "standoff": 10}, **more}
