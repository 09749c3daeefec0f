"""What more replicas are predicted to bring, by either way to sync."""

from collections.abc import Sequence

from sambasim.report.page.figure import LEGEND, Figure, Trace, axis, figure
from sambasim.report.page.html import element, joined
from sambasim.report.page.palette import GREY, PATHS
from sambasim.report.page.part import Part, plot, seconds_or_none, table
from sambasim.report.page.timeline import WAYS
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.scaling import ScaledStep
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_seconds, plain_rate

_DASHES = {SyncPath.RDU: "solid", SyncPath.HOST: "dot"}
_SYMBOLS = {SyncPath.RDU: "circle", SyncPath.HOST: "diamond"}


def scaling(prediction: Prediction) -> Part:
    """Curves, and a row for each count of replicas."""
    steps = prediction.scaled[SyncPath.RDU]
    if prediction.program.training is None:
        note = "There is no training step in this PEF: replicas exchange nothing, and twice as many do twice as much."
        return Part("scaling", "Scaling", note, False, joined([]))
    counts = [step.placement.replicas for step in steps]
    return Part(
        id="scaling",
        title="Scaling",
        lead=(
            f"Each replica has a batch of its own, so the global batch grows with them. {_seats(steps[0])} An "
            "efficiency of 100 % is that of one replica alone; where RDUs sync it can be more, because each "
            "replica then updates its slice of the parameters only."
        ),
        measured=False,
        body=joined(
            [
                element(
                    "div",
                    plot("scaling-speed", 340, "Samples per second over replicas, by way to sync"),
                    plot("scaling-efficiency", 340, "Efficiency over replicas, by way to sync"),
                    class_="pair",
                ),
                _rows(prediction),
            ]
        ),
        figures={
            "scaling-speed": _speed(prediction, counts),
            "scaling-efficiency": _efficiency(prediction, counts),
        },
    )


def _seats(step: ScaledStep) -> str:
    placement = step.placement
    each = "one replica an RDU" if placement.per_rdu == 1 else f"{placement.per_rdu} replicas an RDU"
    return f"{placement.cluster.name} seats {each}, {placement.per_full_node} a node."


def _counts_axis(counts: Sequence[int]) -> dict[str, object]:
    return axis("replicas", type="log", tickvals=counts, ticktext=list(map(str, counts)), fixedrange=True)


def _speed(prediction: Prediction, counts: Sequence[int]) -> Figure:
    alone = prediction.alone
    ideal: Trace = {
        "type": "scatter",
        "mode": "lines",
        "name": "no sync at all",
        "x": counts,
        "y": [count * alone.samples_per_s for count in counts],
        "line": {"color": GREY, "dash": "dash", "width": 1.5},
        "hoverinfo": "skip",
    }
    curves = [_curve(prediction, path, [step.samples_per_s for step in prediction.scaled[path]]) for path in SyncPath]
    return figure(
        [ideal, *curves],
        xaxis=_counts_axis(counts),
        yaxis=axis("predicted samples/s", type="log", exponentformat="SI", dtick=1, fixedrange=True),
        legend={**LEGEND, "y": 1.02},
    )


def _efficiency(prediction: Prediction, counts: Sequence[int]) -> Figure:
    efficiencies = {path: [step.efficiency(prediction.alone) for step in prediction.scaled[path]] for path in SyncPath}
    top = 1.05 * max(1.0, *(value for values in efficiencies.values() for value in values))
    return figure(
        [_curve(prediction, path, values) for path, values in efficiencies.items()],
        xaxis=_counts_axis(counts),
        yaxis=axis("predicted efficiency", range=[0, top], tickformat=".0%", fixedrange=True),
        legend={**LEGEND, "y": 1.02},
    )


def _curve(prediction: Prediction, path: SyncPath, values: Sequence[float]) -> Trace:
    steps = prediction.scaled[path]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": WAYS[path],
        "x": [step.placement.replicas for step in steps],
        "y": values,
        "hovertext": [
            f"<b>{step.placement.replicas} replicas, {WAYS[path]}</b><br>{plain_rate(step.samples_per_s)} samples/s, "
            f"efficiency {step.efficiency(prediction.alone):.1%}<br>step {format_seconds(step.predicted_s)}, of it "
            f"{format_seconds(step.exposed_sync_s)} waiting for sync<br>{step.way or 'nothing to sync'}"
            for step in steps
        ],
        "hoverinfo": "text",
        "line": {"color": PATHS[path], "width": 2.5, "dash": _DASHES[path]},
        "marker": {"size": 7, "symbol": _SYMBOLS[path]},
    }


def _rows(prediction: Prediction) -> str:
    ways = [
        element("th", WAYS[path], colspan=4, class_="way", style=f"border-bottom-color:{PATHS[path]}")
        for path in SyncPath
    ]
    above = element("tr", element("th", "", colspan=2), *ways)
    heads = ["replicas", "nodes", *(["step", "samples/s", "efficiency", "waiting"] * len(SyncPath))]
    rows = []
    for steps in zip(*prediction.scaled.values(), strict=True):
        placement = steps[0].placement
        row = [str(placement.replicas), str(placement.nodes)]
        for step in steps:
            row += [
                format_seconds(step.predicted_s),
                plain_rate(step.samples_per_s),
                f"{step.efficiency(prediction.alone):.1%}",
                seconds_or_none(step.exposed_sync_s),
            ]
        rows.append(row)
    return table(heads, rows, words=0, class_="compact", above=above)
