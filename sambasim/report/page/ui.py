"""Building blocks of the page: escaped HTML, colours, plotly figures, tables, bars and key figures."""

import html
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from typing import NamedTuple, TypeAlias

from sambasim.costs.price import Bound
from sambasim.errors import printable
from sambasim.ir.graph import SectionKind
from sambasim.report.tables import Table
from sambasim.units import MICROSECOND_S, format_seconds


class Html(str):
    """Text that is already HTML. Only this file and the template create it; all other text is escaped."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: str | int | bool | None) -> Html:
    """`class_` becomes `class`, `data_x` becomes `data-x`; attributes that are None or False are left out."""
    opening = f"<{name}"
    for key, value in attributes.items():
        if value is not None and value is not False:
            opening += f" {key.rstrip('_').replace('_', '-')}"
            opening += "" if value is True else f'="{html.escape(printable(str(value)))}"'
    opening += ">"
    return Html(opening if name == "input" else f"{opening}{joined(*children)}</{name}>")


def joined(*children: str) -> Html:
    """Concatenate; each child is escaped unless it is HTML."""
    return Html("".join(child if isinstance(child, Html) else html.escape(printable(child)) for child in children))


def for_script(data: object) -> Html:
    """JSON that cannot close its script element, in 7 digits. Raises ValueError for numbers that are not finite."""
    rounded = json.loads(json.dumps(data, allow_nan=False), parse_float=lambda digits: float(f"{float(digits):.7g}"))
    text = json.dumps(rounded, separators=(",", ":"))
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


BLUE, VERMILLION, GREEN, PURPLE, DEEP, SKY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#08415c", "#56b4e9"
ORANGE, YELLOW, GREY, INK, HAIRLINE = "#e69f00", "#f0e442", "#9aa1a9", "#1b1f24", "#e3e7eb"

BOUNDS = {Bound.COMPUTE: BLUE, Bound.MEMORY: ORANGE, Bound.CAPACITY: VERMILLION, Bound.LAUNCH: GREY}

KINDS: Mapping[str, str] = {
    "HOST": GREY, SectionKind.FWD: SKY, SectionKind.BCKWD: BLUE, SectionKind.GRADNORM: YELLOW,
    SectionKind.OPT: ORANGE, SectionKind.REDUCE: GREEN, SectionKind.GATHER: PURPLE,
}  # fmt: skip

Trace: TypeAlias = Mapping[str, object]
Figure: TypeAlias = Mapping[str, object]

_FONT = {"family": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif", "size": 12, "color": INK}
_AXIS = {"gridcolor": HAIRLINE, "linecolor": "#8b949e", "zeroline": False, "ticks": "outside", "tickcolor": "#8b949e"}


# `meta` of a trace: the kind of its hover text, which page.js makes, as texts of all points would be most of the page.
LEGEND = {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom", "xanchor": "left"}
SECONDS = {"ticksuffix": "s", "exponentformat": "SI", "minexponent": 0, "rangemode": "tozero"}

_MOST_APART = 150  # with more bars on the width of the page there are no gaps between them


def outline_and_gap(count: int, gap: float) -> tuple[dict[str, object], float]:
    """Of `count` bars; none where they are too many to be seen apart."""
    return ({"color": "white", "width": 0.5}, gap) if count <= _MOST_APART else ({"width": 0}, 0.0)


def figure(traces: Sequence[Trace], **layout: object) -> Figure:
    colours = {"template": {}, "font": _FONT, "paper_bgcolor": "white", "plot_bgcolor": "white"}
    hover = {"align": "left", "bgcolor": "white", "bordercolor": "#8b949e", "font": _FONT}
    style = {**colours, "margin": {"l": 64, "r": 16, "t": 34, "b": 44}, "hoverlabel": hover, "legend": LEGEND}
    return {"data": list(map(dict, traces)), "layout": {**style, "dragmode": "zoom", **layout}}


def axis(title: str, **more: object) -> dict[str, object]:
    return {**_AXIS, "title": {"text": title, "font": _FONT, "standoff": 10}, **more}


def lines(name: str, x: Sequence[float], y: Sequence[float | None], **more: object) -> Trace:
    """A line with gaps where a value is None or not finite."""
    drawn = [None if value is None or not math.isfinite(value) else value for value in y]
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": drawn, **more}


MOST_SPANS = 5000  # spans of a step that are drawn; a page with more is slow to open


class Bar(NamedTuple):
    """A span in a row of a timeline. `data` is a section's number or a name, for the hover text; `text` labels it."""

    name: str
    row: str
    start_s: float
    length_s: float
    data: int | str
    text: str = ""


def bars_of(name: str, colour: str, spans: Sequence[Bar], line: Mapping[str, object]) -> Trace:
    fields = {"y": "row", "base": "start_s", "x": "length_s", "customdata": "data"}
    labels = {"text": [bar.text for bar in spans], "textposition": "inside", "insidetextanchor": "middle"}
    return {
        **{"type": "bar", "orientation": "h", "name": name},
        **{key: [getattr(bar, field) for bar in spans] for key, field in fields.items()},
        **{"meta": "spans", "marker": {"color": colour, "line": line}},
        **(labels if any(bar.text for bar in spans) else {}),
    }


@dataclass(frozen=True, slots=True)
class Part:
    """A section of the page; `figures` by the id of their element, `data` for the page's script."""

    id: str
    title: str
    lead: str
    body: Html = field(default_factory=Html)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    data: Mapping[str, object] = field(default_factory=dict)
    kind: str = "predicted"


def caveat(heading: str, text: str) -> Html:
    return element("p", element("b", heading), f" {text}", class_="caveat")


def keys(figures: Iterable[tuple[str, str, str]]) -> Html:
    def card(name: str, number: str, note: str) -> Html:
        below = element("dd", number, title=number), element("dd", note, class_="note", title=note)
        return element("div", element("dt", name), *below, class_="key")

    return element("dl", *starmap(card, figures), class_="keys")


def plot(id_: str, height: int, label: str) -> Html:
    return element("div", id=id_, class_="plot", style=f"height:{height}px", role="img", aria_label=label)


def pair(*parts: Html) -> Html:
    return element("div", *parts, class_="pair")


def without_host(plot_id: str, host_s: float, last_s: float) -> Html:
    """A button that shows the time axis of a plot from the end of the host's time to `last_s`, and back."""
    numbers = {"data_plot": plot_id, "data_from": f"{host_s:.9g}", "data_to": f"{1.01 * last_s:.9g}"}
    button = element("button", "Without the host", type="button", aria_pressed="false", **numbers)
    return element("div", button, f"The host takes {format_seconds(host_s)} before the device starts.", class_="tools")


def shares(title: str, parts: Iterable[tuple[str, float, str]]) -> Html:
    """A bar of named seconds in their colours."""
    present = [(name, time_s, colour) for name, time_s, colour in parts if time_s > 0]
    total_s = sum(time_s for _, time_s, _ in present) or 1.0
    bar, legend = [], []
    for name, time_s, colour in present:
        words, style = format_seconds(time_s), f"background:{colour}"
        bar.append(element("span", style=f"width:{time_s / total_s:.4%};{style}", title=f"{name}: {words}"))
        share, dot = f" {time_s / total_s:.0%}", element("i", style=style)
        legend.append(element("li", dot, element("b", name), share, element("small", words)))
    bars_and_legend = element("div", *bar, class_="bar"), element("ul", *legend)
    return element("div", element("h3", title), *bars_and_legend, class_="shares")


def table(table: Table, class_: str = "") -> Html:
    """A table without its title. On a narrow screen it scrolls in its own box."""

    def line(name: str, row: Sequence[str]) -> Html:
        cells = (
            element(name, cell, class_="number") if column.is_number else element(name, cell, title=cell)
            for cell, column in zip(row, table.columns, strict=True)
        )
        return element("tr", *cells)

    head = element("thead", line("th", [column.head for column in table.columns]))
    body = element("tbody", *(line("td", row) for row in table.rows))
    narrowest = f"min-width:{84 * len(table.columns)}px"
    return element("div", element("table", head, body, class_=class_ or None, style=narrowest), class_="scroll")


def titled(shown: Table, class_: str = "") -> Html:
    return joined(element("h3", shown.title), table(shown, class_))


def seconds_or_none(time_s: float) -> str:
    return format_seconds(time_s) if time_s > MICROSECOND_S / 1000 else "-"


def live_table(id_: str, placeholder: str) -> Html:
    """A table that the script fills. A click on a heading sorts it; words filter it."""
    box = element("input", type="search", placeholder=placeholder, aria_label=placeholder, data_for=id_)
    tools = element("div", box, element("span", class_="count", data_for=id_), class_="tools")
    return element("div", tools, element("div", id=id_, class_="rows"), class_="live")
