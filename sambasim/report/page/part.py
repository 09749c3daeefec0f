"""A part of the page, and the small forms of which parts are made."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sambasim.report.page.figure import Figure
from sambasim.report.page.html import Html, element, joined
from sambasim.units import MICROSECOND_S, format_seconds

_NO_TIME_S = MICROSECOND_S / 1000


@dataclass(frozen=True, slots=True)
class Part:
    """What stands under one heading.

    id: of the heading, for links; figures and tables in it are named after it
    lead: one sentence that says how to read it
    figures: by the id of the element that they are drawn into
    data: what the script of the page wants, by name
    """

    id: str
    title: str
    lead: str
    measured: bool
    body: Html
    figures: Mapping[str, Figure] = field(default_factory=dict)
    data: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Key:
    """A key figure: what it is, its number, and a word on it."""

    name: str
    number: str
    note: str = ""


def keys(figures: Iterable[Key]) -> Html:
    """Key figures side by side."""
    cards = (
        element(
            "div",
            element("dt", key.name),
            element("dd", key.number, title=key.number),
            element("dd", key.note, class_="note", title=key.note),
            class_="key",
        )
        for key in figures
    )
    return element("dl", *cards, class_="keys")


def plot(id_: str, height: int, label: str) -> Html:
    """Where a figure is drawn; `label` is read out instead of it."""
    return element("div", id=id_, class_="plot", style=f"height:{height}px", role="img", aria_label=label)


def shares(title: str, parts: Sequence[tuple[str, float, str, str]]) -> Html:
    """A bar of a whole: name, amount, the amount in words, and colour of each part. Its legend has the numbers."""
    total = sum(amount for _, amount, _, _ in parts) or 1.0
    present = [part for part in parts if part[1] > 0]
    bar = (
        element("span", style=f"width:{amount / total:.4%};background:{colour}", title=f"{name}: {words}")
        for name, amount, words, colour in present
    )
    legend = (
        element(
            "li",
            element("i", style=f"background:{colour}"),
            element("b", name),
            f" {amount / total:.0%}",
            element("small", words),
        )
        for name, amount, words, colour in present
    )
    return element(
        "div", element("h3", title), element("div", *bar, class_="bar"), element("ul", *legend), class_="shares"
    )


def table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1, class_: str = "", above: str = ""
) -> Html:
    """A table whose first `words` columns are text, and the others numbers, to the right; `above` is one more row of
    headings."""

    def cells(name: str, row: Sequence[str]) -> Html:
        return joined(
            element(name, cell, class_=None if column < words else "number", title=cell if column < words else None)
            for column, cell in enumerate(row)
        )

    head = element("thead", above, element("tr", cells("th", heads)))
    body = element("tbody", *(element("tr", cells("td", row)) for row in rows))
    return element("table", head, body, class_=class_ or None)


def seconds_or_none(time_s: float) -> str:
    """As a cell has it: a dash for no time at all, and for what rounding leaves of none."""
    return format_seconds(time_s) if time_s > _NO_TIME_S else "-"


def live_table(id_: str, placeholder: str, *, search: bool = True) -> Html:
    """A table that the script fills: sorted by a click on a heading, and searched by words."""
    box = element("input", type="search", placeholder=placeholder, aria_label=placeholder, data_for=id_)
    count = element("span", class_="count", data_for=id_)
    tools = element("div", *((box, count) if search else (count,)), class_="tools")
    return element("div", tools, element("div", id=id_, class_="rows"), class_="live")
