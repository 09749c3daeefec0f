"""The sections of a predicted step: what their time is made of, how busy compute is, and what binds each."""

from sambasim.report.page.facts import bound_words
from sambasim.report.page.figure import LEGEND, SECONDS, Hover, Trace, axis, bars, figure
from sambasim.report.page.html import joined, visible
from sambasim.report.page.palette import BOUNDS, PARTS
from sambasim.report.page.part import Part, live_table, plot
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.step import TimedSection

_MOST_NUMBERED = 32
"""Sections, of which each has its number at the axis."""

_LEAST_SHARE = 0.05
"""Where the axis of shares ends at least."""


def sections(prediction: Prediction) -> Part:
    """A bar and a row for each."""
    timed = prediction.alone.sections
    numbers = list(range(len(timed)))
    shared: Trace = {"type": "bar", "x": numbers, "customdata": numbers, "meta": Hover.SECTIONS}
    line, gap = bars(len(timed), gap=0.12)
    traces: list[Trace] = [
        {**shared, "name": name, "y": seconds, "marker": {"color": PARTS[name], "line": line}}
        for name, seconds in _stacked(timed).items()
    ]
    traces.append(
        {
            **shared,
            "name": "compute in use",
            "y": [_in_use(section) for section in timed],
            "yaxis": "y2",
            "showlegend": False,
            "marker": {"color": [BOUNDS[section.price.bound] for section in timed], "line": line},
        }
    )
    most = min(1.0, max([_LEAST_SHARE, *(1.15 * _in_use(section) for section in timed)]))
    drawn = figure(
        traces,
        barmode="stack",
        bargap=gap,
        xaxis=axis(
            "section, in the order in which they run",
            anchor="y2",
            range=[-0.6, len(timed) - 0.4],
            showgrid=False,
            tickformat="d",
            **({"dtick": 1} if len(timed) <= _MOST_NUMBERED else {}),
        ),
        yaxis=axis("predicted", domain=[0.42, 1], fixedrange=True, **SECONDS),
        yaxis2=axis("compute in use", domain=[0, 0.3], range=[0, most], fixedrange=True, tickformat=".0%", nticks=5),
        legend={**LEGEND, "traceorder": "normal"},
    )
    rows = [_cells(prediction, number, section) for number, section in enumerate(timed)]
    return Part(
        id="sections",
        title="Sections",
        lead=(
            "Memory and compute run at the same time, so the bar shows the longer of the two, then what filling and "
            "draining the pipeline and launching it add. Below: the part of its time in which the slowest stage "
            "computes, coloured by what binds the section. A click on a bar or a row opens the section further down."
        ),
        measured=False,
        body=joined(
            [
                plot("sections-figure", 400, "Seconds and use of compute, section by section"),
                live_table("sections-rows", "Search sections: name, kind, what binds"),
            ]
        ),
        figures={"sections-figure": drawn},
        data={"sections": rows, "parts": list(PARTS.items())},
    )


def _stacked(timed: tuple[TimedSection, ...]) -> dict[str, list[float]]:
    prices = [section.price for section in timed]
    return {
        "compute": [price.compute_s if price.compute_s > price.memory_s else 0.0 for price in prices],
        "memory": [price.memory_s if price.memory_s >= price.compute_s else 0.0 for price in prices],
        "fill": [price.fill_s for price in prices],
        "launch": [price.launch_s for price in prices],
    }


def _in_use(section: TimedSection) -> float:
    price = section.price
    return price.compute_s / price.predicted_s if price.predicted_s else 0.0


def _cells(prediction: Prediction, number: int, section: TimedSection) -> list[object]:
    """As the script of the page reads them; see there."""
    price, load = section.price, section.load
    return [
        number,
        section.kind.value,
        visible(section.name),
        section.operators,
        price.compute_s,
        price.memory_s,
        price.fill_s,
        price.launch_s,
        price.predicted_s,
        load.read_bytes,
        load.written_bytes,
        load.resident_bytes,
        load.product_flops,
        bound_words(prediction, price.bound),
        BOUNDS[price.bound],
    ]
