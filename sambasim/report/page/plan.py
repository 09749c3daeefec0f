"""The page of `sambasim plan`: the verdict, time and memory of all strategies, and the best ones."""

from collections.abc import Sequence
from random import Random

from sambasim.report.page import ui
from sambasim.report.plan import BASIS, TERMS, best_rows, closest, verdict
from sambasim.report.tables import table, text_table
from sambasim.simulation.planning.priced import Priced
from sambasim.simulation.planning.search import Plan
from sambasim.units import counted, format_bytes, format_seconds

_MOST_POINTS = 4000
"""Of the cloud behind the frontier: a page with more is slow."""

_COLOURS = dict(zip(TERMS, (ui.BLUE, ui.GREY, ui.SKY, ui.HAIRLINE, ui.ORANGE, ui.GREEN), strict=True))


def facts_line(plan: Plan) -> list[tuple[str, str]]:
    return [
        ("hardware", plan.hardware),
        ("global batch", f"{plan.space.global_batch:,}"),
        ("goal", plan.goal.value),
        ("strategies", f"{len(plan.everything):,}"),
    ]


def caveat(plan: Plan) -> ui.Html:
    if plan.note:
        return ui.element("p", plan.note, class_="caveat")
    return ui.element("p", ui.element("b", "Predicted, not measured."), f" {BASIS}.", class_="caveat")


def parts_of(plan: Plan) -> list[ui.Part]:
    parts = [_verdict(plan)]
    if plan.best:
        parts += [_frontier(plan), _best(plan)]
    return parts


def _verdict(plan: Plan) -> ui.Part:
    lead = "The questions of the usual guides." if plan.best else f"No strategy fits. The closest: {closest(plan)}."
    return ui.Part(
        "verdict", "Verdict", lead, ui.table(text_table("", ("question", "answer"), (), verdict(plan)), "facts sources")
    )


def _frontier(plan: Plan) -> ui.Part:
    best, frontier = plan.best[0], plan.frontier
    cloud = [priced for priced in plan.fitting if not priced.is_exact]
    compiled = [priced for priced in plan.fitting if priced.is_exact]
    if len(cloud) > _MOST_POINTS:
        cloud = Random(0).sample(cloud, _MOST_POINTS)
    named = {"mode": "markers", "hoverinfo": "text"}
    traces = [
        _points("estimates that fit", cloud, {"color": ui.GREY, "size": 5, "opacity": 0.4}, **named),
        _points("predicted" if plan.note else "compiled and priced", compiled, {"color": ui.BLUE, "size": 9}, **named),
        _points("not beaten in both", frontier, {"color": ui.BLUE, "size": 9}, mode="lines", hoverinfo="skip"),
        _points("the best", [best], {"color": ui.VERMILLION, "size": 13, "symbol": "star"}, **named),
    ]
    drawn = ui.figure(
        traces,
        xaxis=ui.axis("predicted step, s", type="log"),
        yaxis=ui.axis(f"memory of the fullest {plan.device}, GiB", type="log"),
        margin={"l": 64, "r": 16, "t": 52, "b": 48},
        legend=ui.LEGEND,
    )
    how = ": blue ones were compiled and priced, grey ones are estimates" if cloud else ""
    lead = (
        f"A point is a strategy{how}. On the line are those that no other {'blue one ' * bool(cloud)}beats in both time"
        f" and memory ({counted(len(frontier), 'strategy', 'strategies')})."
    )
    body = ui.plot("frontier-figure", 440, "memory of strategies over their predicted step")
    return ui.Part("frontier", "Time and memory", lead, body, {"frontier-figure": drawn})


def _points(name: str, several: Sequence[Priced], marker: dict[str, object], **more: object) -> ui.Trace:
    x = [priced.step_s for priced in several]
    y = [priced.rdu_bytes / (1 << 30) for priced in several]
    texts = [
        f"{priced.strategy}: {format_seconds(priced.step_s)}, {format_bytes(priced.rdu_bytes)}"
        f"{'' if priced.is_exact else ', estimated'}"
        for priced in several
    ]
    return ui.lines(name, x, y, marker=marker, hovertext=texts, line={"color": ui.BLUE, "width": 1.5}, **more)


def _best(plan: Plan) -> ui.Part:
    terms = ", ".join(f"{name}:{title}" for name, title in TERMS.items())
    rows = [
        {**row, **{name: ui.seconds_or_none(getattr(priced.terms, name)) for name in TERMS}}
        for row, priced in zip(best_rows(plan), plan.best, strict=True)
    ]
    numbers = f"step_s, samples/s, rdu_bytes:memory, bubble_share:bubble, {terms}, rdus:{plan.device}s"
    best = table("", rows, "strategy", numbers)
    bars = map(_shares, plan.best[:2])
    lead = "The best strategy of each shape of the mesh. The bars divide the step of the first two."
    body = ui.joined(ui.element("div", *bars, class_="pair"), ui.table(best, "fitted"))
    return ui.Part("best", "The best strategies", lead, body)


def _shares(priced: Priced) -> ui.Html:
    seconds = {name: getattr(priced.terms, name) for name in TERMS}
    parts = [(TERMS[name], term_s, format_seconds(term_s), _COLOURS[name]) for name, term_s in seconds.items()]
    return ui.shares(f"{format_seconds(priced.step_s)}: {priced.strategy}", parts)
