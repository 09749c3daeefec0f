"""Predicted parts about several ways to train: how the speed grows with the number of replicas, and the page of
`sambasim plan` with the verdict, time and memory of all strategies, and the best ones."""

from collections.abc import Mapping, Sequence
from math import ceil, floor
from random import Random
from typing import Literal

from sambasim.report.page import ui
from sambasim.report.page.timeline import WAYS
from sambasim.report.plan import BASIS, TERMS, best_rows, closest, verdict
from sambasim.report.simulation import scaling_table
from sambasim.report.tables import table, text_table
from sambasim.simulation.planning.search import Plan
from sambasim.simulation.planning.strategy import Priced
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.step import PredictedStep
from sambasim.simulation.sync import SyncPath
from sambasim.units import GIB, counted, format_bytes, format_seconds, plain_rate

_STYLES = {SyncPath.RDU: (ui.GREEN, "solid", "circle"), SyncPath.HOST: (ui.PURPLE, "dot", "diamond")}
"""Colour, dash and symbol."""


def scaling(prediction: Prediction) -> ui.Part:
    steps = prediction.steps[SyncPath.RDU]
    if prediction.program.training is None:
        note = "This PEF has no training step: replicas exchange nothing"
        return ui.Part("scaling", "Scaling", f"{note}, so throughput is proportional to their number.")
    first, placement = steps[0], steps[0].placement
    noun, nouns = ("rank", "ranks") if first.several_ranks else ("replica", "replicas")
    each = f"one {noun} an RDU" if placement.per_rdu == 1 else f"{placement.per_rdu} {nouns} an RDU"
    ideal = "the samples/s of one replica" if first.several_ranks else "replicas that share the update and never wait"
    lead = (
        "Each replica has its own batch, so the global batch grows with the number of replicas. "
        f"{placement.cluster.name} has {each}, {placement.per_full_node} {nouns} a node. Efficiency is "
        f"relative to {ideal}."
    )
    body = ui.table(scaling_table(prediction.along(tuple(SyncPath))), "fitted")
    if len({step.replicas for step in steps}) == 1:
        return ui.Part("scaling", "Scaling", lead, body)
    titles = {"scaling-speed": "Samples per second", "scaling-efficiency": "Efficiency"}
    plots = (ui.plot(id_, 340, f"{title} over {nouns}, by way to sync") for id_, title in titles.items())
    figures = _scaling_figures(prediction, nouns)
    return ui.Part("scaling", "Scaling", lead, ui.joined(ui.pair(*plots), body), figures)


def _scaling_figures(prediction: Prediction, nouns: str) -> Mapping[str, ui.Figure]:
    counts = [step.mesh.world_size for step in prediction.steps[SyncPath.RDU]]
    best = zip(*prediction.steps.values(), strict=True)
    rates, dashed = [max(step.ideal_samples_per_s for step in steps) for steps in best], {"dash": "dash", "width": 1.5}
    ideal = ui.lines("without sync", counts, rates, line={"color": ui.GREY, **dashed}, hoverinfo="skip")
    least, most = zoomed([step.efficiency for steps in prediction.steps.values() for step in steps])
    title = "predicted efficiency" + (f" (from {least:.0%}, not from 0)" if least else "")
    ticks = {"tickvals": counts, "ticktext": list(map(str, counts)), "fixedrange": True, "automargin": True}
    shared = {"xaxis": ui.axis(nouns, type="log", **ticks), "legend": {**ui.LEGEND, "y": 1.02}}
    speed = ui.axis("predicted samples/s", type="log", exponentformat="SI", dtick=1, fixedrange=True)
    efficiency = ui.axis(title, range=[least, most], tickformat=".0%", fixedrange=True)
    return {
        "scaling-speed": ui.figure([ideal, *_scaling_curves(prediction, "samples_per_s")], **shared, yaxis=speed),
        "scaling-efficiency": ui.figure(_scaling_curves(prediction, "efficiency"), **shared, yaxis=efficiency),
    }


def zoomed(efficiencies: Sequence[float]) -> tuple[float, float]:
    """The ends of an axis of `efficiencies` and of 100 %, at whole per cents; from 0 if that is near."""
    least, most = min(1.0, *efficiencies), max(1.0, *efficiencies)
    margin = max(0.05, most - least) * 0.12
    start = floor(100 * (least - margin)) / 100
    return (0.0 if start < 0.25 else start), ceil(100 * (most + margin)) / 100


def _scaling_curves(prediction: Prediction, field: Literal["samples_per_s", "efficiency"]) -> list[ui.Trace]:
    def text(path: SyncPath, step: PredictedStep) -> str:
        return (
            f"<b>{counted(step.replicas, 'replica')}, {WAYS[path]}</b><br>{plain_rate(step.samples_per_s)} samples/s, "
            f"efficiency {step.efficiency:.1%}<br>step {format_seconds(step.predicted_s)}, of which "
            f"{format_seconds(step.first.exposed_sync_s)} waiting for sync<br>{step.synced.way or 'nothing to sync'}"
        )

    traces = []
    for path, steps in prediction.steps.items():
        colour, dash, symbol = _STYLES[path]
        counts, texts = [step.mesh.world_size for step in steps], [text(path, step) for step in steps]
        style = {"line": {"color": colour, "width": 2.5, "dash": dash}, "marker": {"size": 7, "symbol": symbol}}
        how = {"mode": "lines+markers", "hovertext": texts, "hoverinfo": "text"}
        traces.append(ui.lines(WAYS[path], counts, [getattr(step, field) for step in steps], **how, **style))
    return traces


_MOST_POINTS = 4000  # of the cloud behind the frontier: a page with more is slow

_COLOURS = dict(zip(TERMS, (ui.BLUE, ui.GREY, ui.SKY, ui.HAIRLINE, ui.ORANGE, ui.GREEN), strict=True))


def plan_content(plan: Plan) -> tuple[list[tuple[str, str]], ui.Html, list[ui.Part]]:
    facts = [("hardware", plan.hardware), ("global batch", f"{plan.space.global_batch:,}")]
    facts += [("goal", plan.goal.value), ("strategies", f"{len(plan.everything):,}")]
    note = ui.caveat("Predicted, not measured.", f"{BASIS}.")
    if plan.note:
        note = ui.element("p", plan.note, class_="caveat")
    lead = "The questions of the usual guides." if plan.best else f"No strategy fits. The closest: {closest(plan)}."
    answers = ui.table(text_table("", ("question", "answer"), (), verdict(plan)), "facts sources")
    answered = ui.Part("verdict", "Verdict", lead, answers)
    return facts, note, [answered, _frontier(plan), _best(plan)] if plan.best else [answered]


def _frontier(plan: Plan) -> ui.Part:
    frontier = plan.frontier
    cloud = [priced for priced in plan.fitting if not priced.is_exact]
    compiled = [priced for priced in plan.fitting if priced.is_exact]
    if len(cloud) > _MOST_POINTS:
        cloud = Random(0).sample(cloud, _MOST_POINTS)
    named, blue = {"mode": "markers", "hoverinfo": "text"}, {"color": ui.BLUE, "size": 9}
    drawn = ui.figure(
        [
            _points("estimates that fit", cloud, {"color": ui.GREY, "size": 5, "opacity": 0.4}, **named),
            _points("predicted" if plan.note else "compiled and priced", compiled, blue, **named),
            _points("not beaten in both", frontier, blue, mode="lines", hoverinfo="skip"),
            _points("the best", plan.best[:1], {"color": ui.VERMILLION, "size": 13, "symbol": "star"}, **named),
        ],
        xaxis=ui.axis("predicted step, s", type="log"),
        yaxis=ui.axis(f"memory of the fullest {plan.device}, GiB", type="log"),
        margin={"l": 64, "r": 16, "t": 52, "b": 48},
    )
    how = ": blue ones were compiled and priced, grey ones are estimates" if cloud else ""
    lead = (
        f"A point is a strategy{how}. On the line are those that no other {'blue one ' * bool(cloud)}beats in both time"
        f" and memory ({counted(len(frontier), 'strategy', 'strategies')})."
    )
    body = ui.plot("frontier-figure", 440, "memory of strategies over their predicted step")
    return ui.Part("frontier", "Time and memory", lead, body, {"frontier-figure": drawn})


def _points(name: str, several: Sequence[Priced], marker: dict[str, object], **more: object) -> ui.Trace:
    def text(priced: Priced) -> str:
        estimated = "" if priced.is_exact else ", estimated"
        return f"{priced.strategy}: {format_seconds(priced.step_s)}, {format_bytes(priced.rdu_bytes)}{estimated}"

    x, y = [priced.step_s for priced in several], [priced.rdu_bytes / GIB for priced in several]
    line = {"color": ui.BLUE, "width": 1.5}
    return ui.lines(name, x, y, marker=marker, hovertext=list(map(text, several)), line=line, **more)


def _best(plan: Plan) -> ui.Part:
    def shares(priced: Priced) -> ui.Html:
        parts = ((title, getattr(priced.terms, name), _COLOURS[name]) for name, title in TERMS.items())
        return ui.shares(f"{format_seconds(priced.step_s)}: {priced.strategy}", parts)

    terms, rows = ", ".join(f"{name}:{title}" for name, title in TERMS.items()), best_rows(plan)
    for row, priced in zip(rows, plan.best, strict=True):
        row |= {name: ui.seconds_or_none(getattr(priced.terms, name)) for name in TERMS}
    numbers = f"step_s, samples/s, rdu_bytes:memory, bubble_share:bubble, {terms}, rdus:{plan.device}s"
    best = ui.table(table("", rows, "strategy", numbers), "fitted")
    lead = "The best strategy of each shape of the mesh. The bars divide the step of the first two."
    return ui.Part("best", "The best strategies", lead, ui.joined(ui.pair(*map(shares, plan.best[:2])), best))
