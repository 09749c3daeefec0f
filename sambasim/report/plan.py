"""What `sambasim plan` shows: the verdict, the best strategies, why one beats the next, and files of all of them. Its
page, `page/choices.py`, names the columns of its own table."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields

from rich.console import RenderableType
from rich.text import Text

from sambasim.report.tables import Table, csv_text, json_line, labelled, table
from sambasim.simulation.planning.purchase import Training, fewest
from sambasim.simulation.planning.search import Goal, Plan, value_of
from sambasim.simulation.planning.strategy import Priced, Terms
from sambasim.simulation.sync import Wire
from sambasim.units import counted, format_bytes, format_seconds, plain_rate

TERMS = {
    "compute_s": "operators", "host_s": "host", "messages_s": "messages in a replica",
    "bubble_s": "waiting for stages", "update_s": "update", "sync_s": "sync",
}  # fmt: skip
"""What the terms of a step are called."""

BASIS = "The device model gives all times; no step of RDUs with pipelines, cut tensors, ZeRO or sync was ever published"

_BEST_FOR = {
    Goal.THROUGHPUT: "fastest",
    Goal.MEMORY: "the least memory of an RDU",
    Goal.COST: "the fewest RDU-seconds a sample",
}


def headline(plan: Plan) -> str:
    best = plan.best[0]
    memory = f"{format_bytes(best.rdu_bytes)} of {format_bytes(best.capacity_bytes * best.sharing)}"
    return (
        f"{best.strategy}: {format_seconds(best.step_s)} a step, {plain_rate(best.samples_per_s)} samples/s on"
        f" {counted(best.rdus, plan.device)}, {memory}"
    )


def plan_report(plan: Plan, *, explain: bool) -> Iterator[RenderableType]:
    yield Text(f"{plan.name}: global batch {plan.space.global_batch:,} on {plan.hardware}", style="bold")
    yield labelled(verdict(plan))
    if not plan.best:
        yield Text(f"no strategy fits; the closest: {closest(plan)}")
        return
    if plan.trainings:
        yield trainings_table(plan)
    title = f"The best {len(plan.best)}, {_BEST_FOR[plan.goal].replace('RDU', plan.device)} first"
    numbers = (
        "step_s, samples/s, rdu_bytes:memory, host_share:host, bubble_share:bubble, sync_share:sync,"
        f" rdus:{plan.device}s{', sample_rdu_s:RDU time a sample' if plan.goal is Goal.COST else ''}"
    )
    yield table(title, best_rows(plan), "number:, strategy", numbers)
    if explain and len(plan.best) > 1:
        yield labelled(explanation(plan.best[0], plan.best[1], plan.device))
    fitting, exact = len(plan.fitting), sum(priced.is_exact for priced in plan.fitting)
    known = "" if exact == fitting else f", {exact:,} of them compiled and priced, the others estimated"
    yield Text(
        f"{counted(fitting, 'strategy', 'strategies')} fit{known}; {len(plan.everything) - fitting:,} do not, and"
        f" {len(plan.refused):,} are impossible; the table has the best of each shape of the mesh"
    )
    yield Text(plan.note or f"predicted, not measured. {BASIS}.")


def verdict(plan: Plan) -> list[tuple[str, str]]:
    """The questions of the usual guides, from one device to nodes, and what to know of the best strategy."""
    rows = [(f"one {plan.device}", _fits_one(plan))]
    if plan.largest_layer_bytes is not None and plan.everything:
        fits = plan.largest_layer_bytes <= max(priced.capacity_bytes for priced in plan.everything)
        size = f"{format_bytes(plan.largest_layer_bytes)} of parameters, gradients and states"
        rows.append(("largest layer", f"{size}: {'fits' if fits else 'does not fit, so tensors must be cut'}"))
    nodes = -(-plan.space.rdus // plan.space.rdus_per_node)
    each = counted(plan.space.rdus_per_node, plan.device)
    links = f"{each}, linked directly" if nodes == 1 else f"{each} each; links between nodes are slower"
    rows.append(("nodes", f"{counted(nodes, 'node')}, {links}"))
    if plan.best:
        rows += [*_training(plan), ("best", headline(plan))]
        rows += [*(_fewer(plan) if plan.goal is Goal.THROUGHPUT else ()), *_as_good(plan), *_host(plan)]
    return rows


def _training(plan: Plan) -> Iterator[tuple[str, str]]:
    """What is trained, and the fewest RDUs on which it ends in time."""
    if not plan.trainings:
        return
    wanted, found = plan.trainings[0].wanted, fewest(plan.trainings)
    of_each = (
        "" if wanted.tokens is None else f" of {wanted.tokens:,} tokens, {wanted.samples * wanted.tokens:.4g} in all"
    )
    yield "training", f"{wanted.samples:,} samples{of_each}"
    if wanted.days is None:
        return
    limit = f"{wanted.days:g} days"
    if found is not None:
        cost = "" if found.cost is None else f", at a cost of {found.cost:,.0f}"
        nodes = counted(-(-found.priced.rdus // plan.space.rdus_per_node), "node")
        takes = f"{found.days:.3g} days, {found.rdu_hours:,.0f} RDU-hours{cost}"
        yield f"within {limit}", f"{counted(found.priced.rdus, 'RDU')} on {nodes}: {takes}, by {found.priced.strategy}"
        return
    fastest = min(plan.trainings, key=lambda each: each.predicted_s)
    why = f"none of up to {plan.space.rdus} RDUs: the fastest takes {fastest.days:.3g} days on {fastest.priced.rdus}"
    yield f"within {limit}", f"{why}. More --nodes, a larger --global-batch, or {fastest.days * 1.001:.3g} days"


def trainings_table(plan: Plan) -> Table:
    """One row for each number of RDUs."""
    rows = [
        {
            **_of_training(plan, each),
            "strategy": str(each.priced.strategy),
            "days": f"{each.days:.3g}",
            "rdu_hours": f"{each.rdu_hours:,.0f}",
            "cost": "" if each.cost is None else f"{each.cost:,.0f}",
            "in_time": "yes" if each.is_in_time else "no",
        }
        for each in plan.trainings
    ]
    wanted = plan.trainings[0].wanted
    columns = "nodes, steps, step_s, days, rdu_hours:RDU-hours"
    columns += ", cost" * (wanted.price is not None) + ", in_time:in time" * (wanted.days is not None)
    return table("Training by the number of RDUs", rows, "rdus:RDUs, strategy", columns)


def _of_training(plan: Plan, training: Training) -> dict[str, object]:
    priced = training.priced
    return {
        "rdus": priced.rdus,
        "nodes": -(-priced.rdus // plan.space.rdus_per_node),
        "steps": training.steps,
        "step_s": priced.step_s,
        "predicted_s": training.predicted_s,
        "days": training.days,
        "rdu_hours": training.rdu_hours,
        "cost": training.cost,
        "in_time": training.is_in_time,
    }


def _fits_one(plan: Plan) -> str:
    def least_of(strategies: Sequence[Priced]) -> Priced:
        return min(strategies, key=lambda priced: priced.fullest.total_bytes)

    alone = [priced for priced in plan.everything if priced.strategy.ranks == 1 and priced.strategy.tiles is None]
    if not alone:
        return "no strategy uses one alone"
    if (least := least_of(alone)).problem is not None:
        return f"the model does not fit: {least.problem} with {least.strategy}"
    plain = [priced for priced in alone if priced.problem is None and priced.strategy.recompute == "none"]
    least = least_of(plain or [least])
    how = "" if plain else f" with {least.strategy}"
    whole = f"{format_bytes(least.fullest.total_bytes)} of {format_bytes(least.capacity_bytes)}"
    samples = counted(least.strategy.samples, "sample")
    return f"the model fits{how}: {whole} at {samples} a pass, so replicas alone are possible"


def _fewer(plan: Plan) -> Iterator[tuple[str, str]]:
    """Why the fastest leaves RDUs idle, which is what takes longer with all of them; and what at most half would do."""
    best = plan.best[0]
    on_all = [priced for priced in plan.fitting if priced.rdus == plan.space.rdus]
    if best.rdus < plan.space.rdus and on_all:
        other = min(on_all, key=lambda priced: (not priced.is_exact, priced.step_s))
        longer_s = {name: getattr(other.terms, name) - getattr(best.terms, name) for name in TERMS}
        term = max(TERMS, key=lambda name: longer_s[name])
        on_all_s, more_s = format_seconds(other.step_s), format_seconds(longer_s[term])
        takes = f"on all, {other.strategy} takes {on_all_s}, with {more_s} more for {TERMS[term]}"
        yield f"fewer {plan.device}s", f"{best.rdus} of {plan.space.rdus}: {takes}"
    of_best = enumerate(plan.best, 1)
    on_half = [(priced.in_turns_s, number) for number, priced in of_best if 2 * priced.rdus <= best.rdus]
    if on_half:
        seconds, number = min(on_half)
        half, slower = plan.best[number - 1], seconds / best.in_turns_s - 1
        shares = ", if replicas of one take turns at the host" if max(half.sharing, best.sharing) > 1 else ""
        more = f"{abs(slower):.0%} {'slower' if slower >= 0 else 'faster'}"
        yield f"half the {plan.device}s", f"{number} is {more}, with {half.rdus} of {best.rdus}{shares}"


def _as_good(plan: Plan) -> Iterator[tuple[str, str]]:
    """The others that differ from the best by less than the usual error of a prediction."""
    values = [value_of(priced, plan.goal) for priced in plan.best]
    near = [number for number, value in enumerate(values, 1) if value <= values[0] * (1 + plan.mean_error)]
    if len(near) > 1:
        numbers = ", ".join(map(str, near[1:]))
        least = min(near, key=lambda number: plan.best[number - 1].rdus)
        fewest = f"; {least} has the fewest {plan.device}s" if least > 1 else ""
        yield "as good", f"{numbers}: within {plan.mean_error:.0%} of it, the mean error of a prediction{fewest}"


def _host(plan: Plan) -> Iterator[tuple[str, str]]:
    best = plan.best[0]
    share = best.terms.host_s / best.step_s
    if share > 0.3 and plan.device == "RDU":
        what = "the host, which starts sections and fetches the outputs of each pass"
        helps = "`sambasim simulate` says what would help, such as a model that returns only its loss"
        yield "host", f"{share:.0%} of the best step is {what}. {helps}"
    if best.sharing > 1:
        shared = f"{best.sharing} replicas share an RDU and its link to the host. Predictions do not wait for it"
        at_worst = f"a step is {format_seconds(best.in_turns_s)} at worst, by which it is ranked"
        yield "tiles", f"{shared}: if they take turns, {at_worst}"


def closest(plan: Plan) -> str:
    lacking = [priced for priced in plan.others if priced.problem is not None]
    if not lacking:
        return next(iter(plan.refused.values()), "there is no strategy with this batch")
    nearest = min(lacking, key=lambda priced: priced.fullest.total_bytes / priced.capacity_bytes)
    return f"{nearest.strategy}: {nearest.problem}"


def best_rows(plan: Plan) -> list[dict[str, object]]:
    return [
        {
            "number": number,
            "strategy": str(priced.strategy),
            "step_s": priced.step_s,
            "samples/s": plain_rate(priced.samples_per_s),
            "rdu_bytes": priced.rdu_bytes,
            "bubble_share": priced.terms.bubble_s / priced.step_s,
            "host_share": priced.terms.host_s / priced.step_s,
            "sync_share": priced.terms.sync_s / priced.step_s,
            "rdus": priced.rdus,
            "sample_rdu_s": priced.step_s * priced.rdus / priced.strategy.global_batch,
        }
        for number, priced in enumerate(plan.best, 1)
    ]


def explanation(best: Priced, other: Priced, device: str = "RDU") -> list[tuple[str, str]]:
    """Term by term, why `best` takes less time than `other`: the largest differences first."""
    seconds = [(name, getattr(best.terms, name), getattr(other.terms, name)) for name in TERMS]
    rows = [("1 against 2", f"{best.strategy}  |  {other.strategy}")]
    for name, mine, theirs in sorted(seconds, key=lambda term: -abs(term[2] - term[1])):
        if mine or theirs:
            more = f"{format_seconds(abs(theirs - mine))} {'less' if mine < theirs else 'more'}"
            rows.append((TERMS[name], f"{format_seconds(mine)} | {format_seconds(theirs)}: {more}"))
    memory = f"{format_bytes(best.rdu_bytes)} | {format_bytes(other.rdu_bytes)}"
    return [*rows, (f"memory of the fullest {device}", memory)]


def record_of(priced: Priced) -> dict[str, object]:
    """A flat record: strategy, predicted seconds by term, memory by part, bytes by link."""
    fullest = priced.fullest
    return {
        **asdict(priced.strategy),
        "rdus": priced.rdus,
        "predicted_step_s": priced.step_s,
        "predicted_samples_per_s": priced.samples_per_s,
        **{f"predicted_{term.name}": getattr(priced.terms, term.name) for term in fields(Terms)},
        "rdu_bytes": priced.rdu_bytes,
        **fullest.sizes,
        "capacity_bytes": priced.capacity_bytes,
        **{f"{wire.value}_bytes": priced.received_bytes.get(wire, 0.0) for wire in Wire},
        "compiled": priced.is_exact,
        "problem": priced.problem or "",
    }


def plan_csv(plan: Plan) -> str:
    rows = [record_of(priced) for priced in plan.everything]
    rows += [{**asdict(strategy), "problem": why} for strategy, why in plan.refused.items()]
    return csv_text(rows)


def plan_json(plan: Plan) -> str:
    asked = {"model": plan.name, "hardware": plan.hardware, "global_batch": plan.space.global_batch}
    asked |= {"goal": plan.goal.value, "verdict": dict(verdict(plan))}
    found = {name: list(map(record_of, getattr(plan, name))) for name in ("best", "frontier")}
    counts = {"priced": len(plan.everything), "impossible": len(plan.refused)}
    if plan.trainings:
        asked["training"] = asdict(plan.trainings[0].wanted)
        found["trainings"] = [{**_of_training(plan, each), **record_of(each.priced)} for each in plan.trainings]
    return json_line({**asked, **found, **counts, "note": plan.note or BASIS})
