"""How the predicted speed grows with the number of replicas."""

from collections.abc import Mapping, Sequence
from math import ceil, floor

from sambasim.report.page import ui
from sambasim.report.page.timeline import WAYS
from sambasim.report.steps import scaling_table
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.sync import SyncPath
from sambasim.units import counted, format_seconds, plain_rate

_DASHES = {SyncPath.RDU: "solid", SyncPath.HOST: "dot"}
_SYMBOLS = {SyncPath.RDU: "circle", SyncPath.HOST: "diamond"}


def scaling(prediction: Prediction) -> ui.Part:
    steps = prediction.steps[SyncPath.RDU]
    if prediction.program.training is None:
        note = (
            "This PEF has no training step: replicas exchange nothing, so throughput is proportional to their number."
        )
        return ui.Part("scaling", "Scaling", note, ui.joined())
    first, placement = steps[0], steps[0].placement
    noun, nouns = ("rank", "ranks") if first.several_ranks else ("replica", "replicas")
    each = f"one {noun} an RDU" if placement.per_rdu == 1 else f"{placement.per_rdu} {nouns} an RDU"
    ideal = "the samples/s of one replica" if first.several_ranks else "replicas that share the update and never wait"
    table = ui.table(scaling_table(prediction.along(tuple(SyncPath))), "fitted")
    several = len({step.replicas for step in steps}) > 1
    plots = ui.element(
        "div",
        ui.plot("scaling-speed", 340, f"Samples per second over {nouns}, by way to sync"),
        ui.plot("scaling-efficiency", 340, f"Efficiency over {nouns}, by way to sync"),
        class_="pair",
    )
    return ui.Part(
        id="scaling",
        title="Scaling",
        lead=(
            "Each replica has its own batch, so the global batch grows with the number of replicas. "
            f"{placement.cluster.name} has {each}, {placement.per_full_node} {nouns} a node. Efficiency is "
            f"relative to {ideal}."
        ),
        body=ui.joined(plots, table) if several else table,
        figures=_scaling_figures(prediction, nouns) if several else {},
    )


def _scaling_figures(prediction: Prediction, nouns: str) -> Mapping[str, ui.Figure]:
    counts = [step.mesh.world_size for step in prediction.steps[SyncPath.RDU]]
    best = zip(*prediction.steps.values(), strict=True)
    ideal = ui.lines(
        "without sync",
        counts,
        [max(step.ideal_samples_per_s for step in steps) for steps in best],
        line={"color": ui.GREY, "dash": "dash", "width": 1.5},
        hoverinfo="skip",
    )
    speeds = {path: [step.samples_per_s for step in prediction.steps[path]] for path in SyncPath}
    efficiencies = {path: [step.efficiency for step in prediction.steps[path]] for path in SyncPath}
    least, most = zoomed([value for values in efficiencies.values() for value in values])
    title = "predicted efficiency" + (f" (from {least:.0%}, not from 0)" if least else "")
    x = ui.axis(nouns, type="log", tickvals=counts, ticktext=list(map(str, counts)), fixedrange=True, automargin=True)
    legend = {**ui.LEGEND, "y": 1.02}
    return {
        "scaling-speed": ui.figure(
            [ideal, *(_curve(prediction, path, values) for path, values in speeds.items())],
            xaxis=x,
            yaxis=ui.axis("predicted samples/s", type="log", exponentformat="SI", dtick=1, fixedrange=True),
            legend=legend,
        ),
        "scaling-efficiency": ui.figure(
            [_curve(prediction, path, values) for path, values in efficiencies.items()],
            xaxis=x,
            yaxis=ui.axis(title, range=[least, most], tickformat=".0%", fixedrange=True),
            legend=legend,
        ),
    }


_ZOOM_MARGIN = 0.12
_LEAST_SPAN = 0.05


def zoomed(efficiencies: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis of `efficiencies` and of 100 %, at whole per cents; from 0 if that is near."""
    least, most = min(1.0, *efficiencies), max(1.0, *efficiencies)
    margin = max(_LEAST_SPAN, most - least) * _ZOOM_MARGIN
    start = floor(100 * (least - margin)) / 100
    return (0.0 if start < _NEAR_ZERO else start), ceil(100 * (most + margin)) / 100


_NEAR_ZERO = 0.25


def _curve(prediction: Prediction, path: SyncPath, values: Sequence[float]) -> ui.Trace:
    steps = prediction.steps[path]
    texts = [
        f"<b>{counted(step.replicas, 'replica')}, {WAYS[path]}</b><br>{plain_rate(step.samples_per_s)} samples/s, "
        f"efficiency {step.efficiency:.1%}<br>step {format_seconds(step.predicted_s)}, of which "
        f"{format_seconds(step.exposed_sync_s)} waiting for sync<br>{step.synced.way or 'nothing to sync'}"
        for step in steps
    ]
    return ui.lines(
        WAYS[path],
        [step.mesh.world_size for step in steps],
        values,
        mode="lines+markers",
        hovertext=texts,
        hoverinfo="text",
        line={"color": ui.PATHS[path], "width": 2.5, "dash": _DASHES[path]},
        marker={"size": 7, "symbol": _SYMBOLS[path]},
    )
