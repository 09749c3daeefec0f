"""What the memory beside the chip holds while a predicted step runs, and how much of it there is."""

from sambasim.ir.types import SymbolKind
from sambasim.report.page.figure import SECONDS, Hover, Trace, axis, figure
from sambasim.report.page.header import memory_words
from sambasim.report.page.html import element, joined
from sambasim.report.page.palette import BLUE, INK, SKY, VERMILLION
from sambasim.report.page.part import Part, plot, table
from sambasim.simulation.prediction import Prediction
from sambasim.units import GIB, KIB, MIB, TIB, format_bytes

_MOST_TENSORS = 8
_MOST_TICKS = 6
_NEAR = 3
"""A limit is drawn where it is no higher than so many times what is needed; a higher one is told in words."""


def memory(prediction: Prediction) -> Part:
    """Its height over time, and what it is made of."""
    need, budget = prediction.alone.need, prediction.alone.budget
    most = need.kept_bytes + max(need.residency.taken_bytes, default=0)
    limits = [("Capacity", budget.capacity_bytes, VERMILLION)]
    if budget.behind is not None:
        limits.insert(0, ("HBM", budget.behind.fast_bytes, INK))
    drawn_limits = [limit for limit in limits if limit[1] <= _NEAR * most]
    top = max([most, *(size for _, size, _ in drawn_limits)]) * 1.08
    values, words = _ticks(top)
    end_s = prediction.alone.predicted_s
    drawn = figure(
        _traces(prediction),
        hovermode="x",
        xaxis=axis("predicted time since the step began, one replica", range=[0, end_s], **SECONDS),
        yaxis=axis("bytes", range=[0, top], tickvals=values, ticktext=words, fixedrange=True),
        margin={"l": 84, "r": 16, "t": 34, "b": 44},
        shapes=[
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": size, "y1": size,
             "line": {"color": colour, "width": 1.5, "dash": "dash"}}
            for _, size, colour in drawn_limits
        ],
        annotations=[
            {"xref": "paper", "x": 1, "xanchor": "right", "y": size, "yanchor": "bottom", "showarrow": False,
             "text": f"{name} {format_bytes(size)}", "font": {"color": colour, "size": 12}}
            for name, size, colour in drawn_limits
        ],
    )  # fmt: skip
    told = "".join(
        f" {name} is {format_bytes(size)}, far above the figure." for name, size, _ in limits if size > _NEAR * most
    )
    lead = (
        f"{memory_words(prediction)} beside the chip: what the program keeps all the time, and on top of it the "
        "tensors that one section hands to a later one."
    )
    return Part(
        id="memory",
        title="Memory over time",
        lead=lead + told,
        measured=False,
        body=joined(
            [
                plot("memory-figure", 320, "Bytes taken in the memory beside the chip over the step"),
                element("div", _kept(prediction), _largest(prediction), class_="pair"),
            ]
        ),
        figures={"memory-figure": drawn},
    )


def _traces(prediction: Prediction) -> list[Trace]:
    """Steps: each section's level from its start to its end. After the backward nothing is handed on."""
    alone = prediction.alone
    taken = [*alone.need.residency.taken_bytes]
    taken += [0] * (len(alone.sections) - len(taken))
    at_s, heights = [0.0, alone.host_s], [0, 0]
    numbers: list[int | None] = [None, None]
    for number, (section, size) in enumerate(zip(alone.sections, taken, strict=True)):
        at_s += [at_s[-1], at_s[-1] + section.price.predicted_s]
        heights += [size, size]
        numbers += [number, number]
    kept = alone.need.kept_bytes
    shared: Trace = {"type": "scatter", "mode": "lines", "x": at_s, "stackgroup": "memory"}
    return [
        {
            **shared,
            "name": "kept by the program",
            "y": [kept] * len(at_s),
            "line": {"color": SKY, "width": 0},
            "fillcolor": SKY,
            "hoverinfo": "skip",
        },
        {
            **shared,
            "name": "between sections",
            "y": heights,
            "line": {"color": BLUE, "width": 0},
            "fillcolor": BLUE,
            "customdata": numbers,
            "meta": Hover.MEMORY,
        },
    ]


def _ticks(top: float) -> tuple[list[int], list[str]]:
    """Round numbers of bytes from 0 to `top`."""
    unit = next((factor for factor in (TIB, GIB, MIB, KIB) if top >= 2 * factor), 1)
    step = unit
    while top / step > _MOST_TICKS:
        step *= 2
    values = [step * number for number in range(int(top / step) + 1)]
    return values, [format_bytes(value).replace(".0 ", " ") for value in values]


def _kept(prediction: Prediction) -> str:
    program = prediction.program
    rows = []
    for kind in SymbolKind:
        symbols = [symbol for symbol in program.symbols.values() if symbol.kind is kind and symbol.offset is not None]
        size = sum(symbol.type.size_bytes for symbol in symbols)
        if size and kind is not SymbolKind.ACCUMULATION_GROUP:  # which are the gradients once more
            rows.append((kind.value.replace("_", " "), str(len(symbols)), format_bytes(size)))
    title = element("h3", f"Kept by the program: {format_bytes(program.device_bytes)}")
    return element("div", title, table(("kind", "symbols", "bytes"), rows))


def _largest(prediction: Prediction) -> str:
    residency = prediction.alone.need.residency
    largest = sorted(residency.boundaries, key=lambda one: (-one.size_bytes, one.address, one.value))[:_MOST_TENSORS]
    rows = [(one.value, f"{one.first} to {one.last}", format_bytes(one.size_bytes)) for one in largest]
    more = len(residency.boundaries) - len(rows)
    title = element("h3", f"Largest between sections, of {len(residency.boundaries)}" if more else "Between sections")
    if not rows:
        return element("div", title, element("p", "None: all of it stays on the chip.", class_="muted"))
    return element("div", title, table(("tensor", "lives in sections", "bytes"), rows, class_="names"))
