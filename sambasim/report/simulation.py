"""What `sambasim simulate` prints, as tables and JSON. Everything is predicted."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import RenderableType
from rich.text import Text

from sambasim.costs.price import Bound
from sambasim.ir.schedule import ActionKind
from sambasim.report.advice import PRICED_IN, advice_fields, advice_parts
from sambasim.report.analysis import Analysis, mfu, mfu_text, model_flops, published, range_text, reachable, roofs_text
from sambasim.report.folds import Fold
from sambasim.report.steps import NOTE, axes_table, on_device, ranks_table, scaling_table, step_record
from sambasim.report.tables import json_line, labelled, table, text_table
from sambasim.simulation.alone import RankAlone
from sambasim.simulation.prediction import Prediction, backing_of, is_recurrent, likely, zero_note
from sambasim.simulation.step import PredictedStep
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_bytes, format_rate, format_seconds


def simulation_json(prediction: Prediction, paths: Sequence[SyncPath]) -> list[str]:
    """The lines that `sambasim simulate --json` prints for one batch size: one, with the scaling, or, of replicas of
    several ranks, one for each step."""
    records = [step_record(step).model_dump() for step in prediction.along(paths)]
    if prediction.program.ranks_of_replica > 1:
        return list(map(json_line, records))
    return [json_line(_one_rank_fields(Analysis(prediction), records))]


def _one_rank_fields(analysis: Analysis, scaling: Sequence[Mapping[str, object]]) -> Mapping[str, object]:
    facts, alone = analysis.prediction, analysis.step
    span = likely(facts)
    return {
        "name": facts.program.name,
        "device": facts.device.name,
        "tiles": facts.tiles,
        "level": facts.level,
        "batch_size": alone.batch_size,
        "predicted_s": alone.predicted_s,
        "device_s": alone.device_s,
        "host_s": alone.host_s,
        "predicted_samples_per_s": alone.samples_per_s,
        "needed_bytes": alone.need.size_bytes,
        "capacity_bytes": alone.budget.capacity_bytes,
        "slow_bytes": alone.tiers.slow_bytes,
        "micro_steps": alone.micro_steps,
        "predicted_least_s": None if span is None else span.least_s,
        "predicted_most_s": None if span is None else span.most_s,
        "backed_by": backing_of(facts.device, _most_replicas(facts)),
        "cluster": facts.cluster.name,
        "headline": analysis.headline,
        "model_flops": model_flops(facts),
        "predicted_mfu": mfu(facts),
        "roofs": {"reachable": asdict(reachable(facts)), "published": asdict(published(facts))},
        **advice_fields(analysis.advice),
        "scaling": scaling,
        "lines": [{"line": line, "predicted_s": seconds} for line, seconds in analysis.line_s.items()],
        "tensors": [{"from": a, "to": b, "bytes": size} for (a, b), size in sorted(analysis.stages.tensors.items())],
        "sections": [_section_fields(analysis, number) for number in range(len(alone.sections))],
    }


def simulation_report(
    predictions: Sequence[Prediction], paths: Sequence[SyncPath], slowest: int
) -> list[RenderableType]:
    """Of each batch size the step, and the scaling of all."""
    parts, steps = list[RenderableType](), [step for prediction in predictions for step in prediction.along(paths)]
    for prediction in predictions:
        several = prediction.program.ranks_of_replica > 1
        parts += _several_ranks(prediction, paths) if several else _one_rank(Analysis(prediction), slowest)
    return [*parts, scaling_table(steps)] if len(steps) > 1 or steps[0].several_ranks else parts


def _several_ranks(prediction: Prediction, paths: Sequence[SyncPath]) -> list[RenderableType]:
    """Of the fewest replicas."""
    first = prediction.along(paths)[0]
    record = step_record(first)
    batch = f"batch {record.batch_size}" + (f" x {first.micro_steps} accumulated" if first.micro_steps > 1 else "")
    lines = [
        f"{on_device(first)}: predicted, not measured; {PRICED_IN}",
        f"  step    {format_seconds(record.predicted_s)}, {batch} a replica",
    ]
    if record.schedule is not None:
        idle = f"the ranks are idle for {record.predicted_idle_share:.1%} of their time in passes"
        lines.append(f"  {record.schedule}: {idle}")
    for axis, seconds in record.predicted_waited_s.items():
        lines.append(f"  along {axis}: rank 0 waits {format_seconds(seconds)} of it")
    used = {action.kind for row in first.schedule.rows for action in row}
    kinds = [kind for kind in ActionKind if kind in used]
    names = [kind.name.lower().replace("_", " ") for kind in kinds]
    stages = text_table(
        "a micro-batch, by rank along pp" if len(first.ranks) > 1 else "a pass",
        ["rank"],
        ["sections", *names, "update"],
        [
            [
                *(str(rank), str(len(one.alone.sections))),
                *(format_seconds(_action_s(first, rank, kind)) for kind in kinds),
                format_seconds(one.update_s),
            ]
            for rank, one in enumerate(first.ranks)
        ],
    )
    notes = Text("\n".join([NOTE, *zero_note(first.program)]))
    return [Text("\n".join(lines)), stages, ranks_table(record), axes_table(record), notes]


def _action_s(step: PredictedStep, rank: int, kind: ActionKind) -> float:
    return sum(cost.predicted_s for (action, _), cost in step.ranks[rank].costs.items() if action is kind)


def _one_rank(analysis: Analysis, slowest: int) -> list[RenderableType]:
    facts, step = analysis.prediction, analysis.step
    title = f"{facts.program.name} on {step.budget.where}, {facts.level}: predicted, not measured; {PRICED_IN}"
    parts: list[RenderableType] = [Text(title), Text(f"\n{analysis.headline}\n"), labelled(_head(analysis))]
    kinds = [
        (
            kind,
            str(sum(step.runs(section) for section in step.sections if section.kind is kind)),
            *_share(step, seconds),
        )
        for kind, seconds in step.device_s_by_kind.items()
    ]
    bounds = [
        (bound_text(step, bound), *_share(step, seconds))
        for bound, seconds in step.device_s_by_bound.items()
        if seconds
    ]
    parts += [
        *advice_parts(analysis.advice),
        text_table("by kind", ["kind"], ["sections", "predicted", "share"], kinds),
        text_table("by bound", ["bound"], ["predicted", "share"], bounds),
    ]
    if slowest:
        parts.append(_slowest_table(analysis, slowest))
    return [*parts, Text("\n".join(_notes(facts)))]


def _share(step: RankAlone, seconds: float) -> tuple[str, str]:
    return format_seconds(seconds), f"{seconds / step.device_s:.0%}"


def _head(analysis: Analysis) -> list[tuple[str, str]]:
    facts, step = analysis.prediction, analysis.step
    what = "step" if facts.program.training is not None else "forward"
    batch = f"batch {step.batch_size}" + (f" x {step.micro_steps} accumulated" if step.micro_steps > 1 else "")
    of_device, of_host = format_seconds(step.device_s), format_seconds(step.host_s)
    rows = [(what, f"{format_seconds(step.predicted_s)}, {batch}: {of_device} of the device, {of_host} of the host")]
    if span := likely(facts):
        rows.append(("range", f"{range_text(span.least_s, span.most_s)}, {span.basis}"))
    memory = f"{format_bytes(step.need.size_bytes)} of {format_bytes(step.budget.capacity_bytes)}"
    kept, between = format_bytes(step.need.kept_bytes), format_bytes(step.need.between_bytes)
    rows += [
        ("speed", f"{format_rate(step.samples_per_s)} samples/s by one replica"),
        ("MFU", f"{mfu(facts):.1%}: {mfu_text(facts)}"),
        ("roofs", roofs_text(facts)),
        ("memory", f"{memory}: {kept} kept, {between} between sections"),
    ]
    if analysis.line_s:
        rows.insert(
            2, ("lines", f"{analysis.costliest_lines} of the device time, by the costliest line of each section")
        )
    if step.tiers.slow_bytes:
        rows.append(("", f"{format_bytes(step.tiers.slow_bytes)} in DDR, because HBM is full"))
    return rows


def _slowest_table(analysis: Analysis, count: int) -> RenderableType:
    """Equal sections of repeated layers are one row, ranked by the time of all of them."""
    folds = sorted(analysis.folds, key=lambda fold: -analysis.fold_s(fold))[:count]
    numbers = (
        "total_s, runs, predicted_s:each, PCUs, PMUs, bound_by, "
        "compute_s, memory_s, fill_s, launch_s, traffic_bytes, operators"
    )
    words, rows = "section, costliest_line, kind, name", [_fold_row(analysis, fold) for fold in folds]
    return table("slowest sections", rows, words, numbers, whole=("costliest_line",))


def _fold_row(analysis: Analysis, fold: Fold) -> Mapping[str, object]:
    number, section = fold.numbers[0], analysis.step.sections[fold.numbers[0]]
    return {
        **_section_fields(analysis, number),
        "section": f"{number} x{len(fold.numbers)}" if len(fold.numbers) > 1 else number,
        "total_s": analysis.fold_s(fold),
        "runs": analysis.runs_in_step(fold),
        "PCUs": f"{section.unit_share:.0%}",
        "PMUs": f"{section.chip_share:.0%}",
        "bound_by": bound_text(analysis.step, section.price.bound),
    }


def bound_text(step: RankAlone, bound: Bound) -> str:
    if bound is Bound.MEMORY:
        return step.budget.memory
    return "capacity of the chip" if bound is Bound.CAPACITY else bound.value


def _section_fields(analysis: Analysis, number: int) -> Mapping[str, object]:
    section = analysis.step.sections[number]
    price, load = section.price, section.load
    return {
        "kind": section.kind,
        "name": section.name,
        "operators": section.operators,
        "predicted_s": price.predicted_s,
        "compute_s": price.compute_s,
        "memory_s": price.memory_s,
        "fill_s": price.fill_s,
        "launch_s": price.launch_s,
        "traffic_bytes": load.traffic_bytes,
        "product_flops": load.product_flops,
        "bound": price.bound,
        "unit_share": section.unit_share,
        "chip_share": section.chip_share,
        "costliest_line": analysis.lines[number] or None,
        "fold": analysis.fold_of[number],
    }


def _most_replicas(facts: Prediction) -> int:
    """The largest number of replicas that sync; 1 without training."""
    if facts.program.training is None:
        return 1
    return max(step.replicas for step in facts.steps[SyncPath.RDU])


def _notes(facts: Prediction) -> list[str]:
    most = _most_replicas(facts)
    notes = [backing_of(facts.device, most)]
    launch_s = facts.alone.device_s_by_bound[Bound.LAUNCH]
    if launch_s > facts.alone.device_s / 2:
        each = format_seconds(facts.alone.budget.launch_s)
        notes.append(f"most of the time is for section launches, {each} each: a larger batch costs little more time")
    if is_recurrent(facts):
        notes.append("recurrent layers are priced as products: the dependency of each time step on the last is ignored")
    if most > 1:
        notes.append(
            f"links are those of cluster {facts.cluster.name} (see sambasim devices), without congestion;"
            " a step waits for the slowest replica"
        )
        if facts.program.training is not None:
            notes.append("efficiency is relative to replicas that share the update and never wait")
        notes += zero_note(facts.program)
    elif facts.program.data_parallel:
        notes.append("this is one replica, without REDUCE and GATHER; --replicas 2,4,8 adds them")
    return notes
