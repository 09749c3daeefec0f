"""What `sambasim simulate` says of a prediction: tables, which the page of `report` has too, JSON, CSV and a plot."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from rich.console import RenderableType
from rich.text import Text

from sambasim.costs.price import Bound
from sambasim.ir.mesh import DATA_PARALLEL, PIPELINE
from sambasim.ir.schedule import ActionKind
from sambasim.report.analysis import NOT_VALIDATED, Analysis, advice_fields, advice_parts, step_or_forward
from sambasim.report.devices import rank_fields
from sambasim.report.tables import Curve, Row, Table, json_line, labelled, log_chart, table, text_table
from sambasim.simulation.alone import RankAlone
from sambasim.simulation.prediction import PRICED_IN, Prediction, backing_of, is_recurrent, likely, zero_note
from sambasim.simulation.step import PredictedStep
from sambasim.simulation.sync import SyncPath, Traffic
from sambasim.units import format_bytes, format_rate, format_seconds

_SHARES = ("busy", "messages", "idle")


def step_record(step: PredictedStep) -> Row:
    """`batch_size`: of a replica in a micro-step; `predicted_efficiency`: see `PredictedStep`."""
    first, fullest_bytes = step.first, max(memory.total_bytes for memory in step.memory)
    return Row(
        name=step.program.name,
        mesh=dict(step.mesh.sizes),
        ranks=step.mesh.world_size,
        nodes=step.placement.nodes,
        replicas=step.replicas,
        chips=step.program.chips,
        batch_size=step.batch_size,
        sync=step.path,
        way=step.synced.way,
        schedule=step.schedule.name if step.program.schedule is not None else None,
        predicted_s=step.predicted_s,
        predicted_samples_per_s=step.samples_per_s,
        predicted_efficiency=step.efficiency,
        predicted_pass_s=step.passes.predicted_s,
        **{"predicted_idle_share": step.idle_share, "predicted_waited_s": step.waited_s},
        **{"predicted_update_s": first.update_s, "predicted_exposed_sync_s": first.exposed_sync_s},
        predicted_hidden_sync_s=step.synced.hidden_sync_s,
        predicted_sync_share=first.exposed_sync_s / step.predicted_s,
        bytes_per_rdu=fullest_bytes * step.placement.on_an_rdu,
        axes=list(_axes(step)),
        each_rank=list(_ranks(step)),
        backed_by=NOT_VALIDATED if step.several_ranks else "",
    )


def _ranks(step: PredictedStep) -> Iterator[Row]:
    """Of the first replica; `activations_bytes` are tensors between sections; shares of its passes."""
    for at in step.placement.locations()[: step.program.ranks_of_replica]:
        position = step.mesh.coordinate(at.replica, PIPELINE)
        times = step.times_of(position)
        yield Row(
            **rank_fields(at, step.mesh),
            stages=tuple(step.schedule.stages_of(position)),
            **step.memory[position].sizes,
            **{f"predicted_{what}_share": getattr(times, f"{what}_s") / step.passes_s for what in _SHARES},
        )


def _axes(step: PredictedStep) -> Iterator[Row]:
    """By mesh axis, in a step: what all ranks of a replica receive; what rank 0 transfers, how long it waits."""
    times = [step.times_of(position) for position in range(len(step.ranks))]
    for axis in (axis for axis, size in step.mesh.sizes.items() if size > 1):
        if axis == DATA_PARALLEL:
            traffic = [each.gathered + rank.synced.moved for each, rank in zip(times, step.ranks, strict=True)]
        else:
            traffic = [each.messages[axis] for each in times]
        if axis == PIPELINE:
            traffic = [sum(rank.copies.values(), moved) for rank, moved in zip(step.ranks, traffic, strict=True)]
        total = sum(traffic, Traffic()) * (step.program.ranks_of_replica // len(step.ranks))
        received = {wire.value: round(size) for wire, size in total.received_bytes.items() if size}
        waited_s = times[0].exposed_sync_s if axis == DATA_PARALLEL else step.waited_s[axis]
        seconds = {"predicted_transfer_s": traffic[0].predicted_s, "predicted_waited_s": waited_s}
        yield Row(axis=axis, received_bytes=received, **seconds)


def ranks_table(step: PredictedStep) -> Table:
    places = zip(_ranks(step), step.placement.locations(), strict=False)
    rows = [rank.model_dump() | {"mesh": step.mesh.place(at.replica), "where": str(at)} for rank, at in places]
    kept = "parameters_bytes, gradients_bytes, states_bytes, buffers_bytes"
    sizes = f"{kept}, activations_bytes:between sections, memory_bytes:memory"
    shares = "predicted_busy_share:busy, predicted_messages_share:messages, predicted_idle_share:idle"
    return table("ranks of a replica", rows, "rank, mesh, where, stages", f"{sizes}, {shares}")


def axes_table(record: Row) -> Table:
    def row(axis: Row) -> Sequence[str]:
        received = axis.received_bytes.items()
        links = ", ".join(f"{format_bytes(size)} by {name.replace('_', ' ')}" for name, size in received)
        return axis.axis, links, *map(format_seconds, (axis.predicted_transfer_s, axis.predicted_waited_s))

    words, numbers = ("axis", "bytes, all ranks of a replica"), ("transfers of rank 0", "rank 0 waits")
    return text_table("a step, by axis", words, numbers, map(row, record.axes))


_SCALING = (
    "predicted_s:step, predicted_samples_per_s:samples/s, predicted_efficiency:efficiency, "
    "predicted_exposed_sync_s:sync waits, predicted_sync_share:share, predicted_hidden_sync_s:hidden, "
    "rdu_bytes:memory of an RDU"
)


def scaling_table(steps: Sequence[PredictedStep]) -> Table:
    several = steps[0].several_ranks
    rows = [
        {**record.model_dump(), "mesh": str(step.mesh), "sync": step.path or "none", "rdu_bytes": record.bytes_per_rdu}
        for step, record in zip(steps, map(step_record, steps), strict=True)
    ]
    words = f"batch_size:batch, {'mesh' if several else 'replicas'}, nodes, sync"
    return table("replicas, predicted", rows, words, f"ranks, {_SCALING}" if several else _SCALING)


def csv_rows(steps: Sequence[PredictedStep]) -> list[Mapping[str, object]]:
    """One flat row for each step; times by axis have a column each."""
    rows: list[Mapping[str, object]] = []
    for step in steps:
        fields = step_record(step).model_dump(exclude={"name", "mesh", "axes", "each_rank", "backed_by"})
        waited = {f"predicted_waited_{axis}_s": seconds for axis, seconds in fields.pop("predicted_waited_s").items()}
        rows.append({"mesh": str(step.mesh), **fields, **waited})
    return rows


def scaling_plot(predictions: Sequence[Prediction], paths: Sequence[SyncPath]) -> str:
    """Samples/s over ranks as SVG: a curve for each batch size and way to sync, and the ideal without waiting."""
    return log_chart(
        f"{on_device(predictions[0].steps[paths[0]][0])}: predicted, not measured",
        ("ranks", "samples per second"),
        ("{:.0f}".format, format_rate),
        [curve for prediction in predictions for curve in _curves(prediction, paths)],
    )


def on_device(step: PredictedStep) -> str:
    """`digits on SN30`; of several ranks, `digits on dp 1 × pp 2, each rank on SN30`."""
    ranks = f"{step.mesh}, each rank on " if step.several_ranks else ""
    return f"{step.program.name} on {ranks}{step.alone.budget.where}"


def _curves(prediction: Prediction, paths: Sequence[SyncPath]) -> Iterator[Curve]:
    of_paths = [sorted(prediction.steps[path], key=lambda step: step.mesh.world_size) for path in paths]
    batch = f", batch {of_paths[0][0].batch_size}"
    for path, steps in zip(paths, of_paths, strict=True):
        if steps[-1].path is not None:  # with the most ranks; one replica has nothing to sync
            yield Curve(f"sync by {path}{batch}", [(step.mesh.world_size, step.samples_per_s) for step in steps])
    best = (max(steps, key=lambda step: step.ideal_samples_per_s) for steps in zip(*of_paths, strict=True))
    yield Curve(f"no sync{batch}", [(step.mesh.world_size, step.ideal_samples_per_s) for step in best], is_bound=True)


def simulation_json(prediction: Prediction, paths: Sequence[SyncPath]) -> list[str]:
    """The lines for one batch size: one, with the scaling; of replicas of several ranks, one for each step."""
    records = [step_record(step).model_dump() for step in prediction.along(paths)]
    if prediction.program.ranks_of_replica > 1:
        return list(map(json_line, records))
    return [json_line(_one_rank_fields(Analysis(prediction), records))]


def _one_rank_fields(analysis: Analysis, scaling: Sequence[Mapping[str, object]]) -> Mapping[str, object]:
    facts, alone = analysis.prediction, analysis.step
    span = likely(facts)
    fold_of = {number: fold for fold, numbers in enumerate(analysis.folds) for number in numbers}
    return {
        "name": facts.program.name,
        "device": facts.device.name,
        "tiles": facts.tiles,
        "level": facts.level,
        **{name: getattr(alone, name) for name in ("batch_size", "predicted_s", "device_s", "host_s")},
        "predicted_samples_per_s": alone.samples_per_s,
        **alone.need.memory.sizes,
        "capacity_bytes": alone.budget.capacity_bytes,
        "slow_bytes": alone.tiers.slow_bytes,
        "micro_steps": alone.micro_steps,
        "predicted_least_s": None if span is None else span.least_s,
        "predicted_most_s": None if span is None else span.most_s,
        "backed_by": backing_of(facts.device, _most_replicas(facts)),
        "cluster": facts.cluster.name,
        "headline": analysis.headline,
        "model_flops": analysis.model_flops,
        "predicted_mfu": analysis.mfu,
        "roofs": {"reachable": asdict(analysis.reachable), "published": asdict(analysis.published)},
        **advice_fields(analysis.advice),
        "scaling": scaling,
        "lines": [{"line": line, "predicted_s": seconds} for line, seconds in analysis.line_s.items()],
        "tensors": [{"from": a, "to": b, "bytes": size} for (a, b), size in sorted(analysis.stages.tensors.items())],
        "sections": [{**_section_fields(analysis, at), "fold": fold_of[at]} for at in range(len(alone.sections))],
    }


def _section_fields(analysis: Analysis, number: int) -> dict[str, object]:
    section = analysis.step.sections[number]
    price, load = section.price, section.load
    return {
        "kind": section.kind,
        "name": section.name,
        "operators": section.load.stages,
        **{name: getattr(price, name) for name in ("predicted_s", "compute_s", "memory_s", "fill_s", "launch_s")},
        "traffic_bytes": load.traffic_bytes,
        "product_flops": load.product_flops,
        "bound": price.bound,
        "unit_share": section.unit_share,
        "chip_share": section.chip_share,
        "costliest_line": analysis.lines[number] or None,
    }


def simulation_report(
    predictions: Sequence[Prediction], paths: Sequence[SyncPath], slowest: int
) -> list[RenderableType]:
    parts, steps = list[RenderableType](), [step for prediction in predictions for step in prediction.along(paths)]
    for prediction in predictions:
        if prediction.program.ranks_of_replica > 1:
            parts += _several_ranks(prediction.along(paths)[0])
        else:
            parts += _one_rank(Analysis(prediction), slowest)
    return [*parts, scaling_table(steps)] if len(steps) > 1 or steps[0].several_ranks else parts


def _batch_text(batch_size: int, micro_steps: int) -> str:
    return f"batch {batch_size}" + (f" x {micro_steps} accumulated" if micro_steps > 1 else "")


def _several_ranks(step: PredictedStep) -> list[RenderableType]:
    record = step_record(step)
    lines = [
        f"{on_device(step)}: predicted, not measured; {PRICED_IN}",
        f"  step    {format_seconds(step.predicted_s)}, {_batch_text(step.batch_size, step.micro_steps)} a replica",
    ]
    if record.schedule is not None:
        lines.append(f"  {record.schedule}: the ranks are idle for {step.idle_share:.1%} of their time in passes")
    lines += [f"  along {axis}: rank 0 waits {format_seconds(wait_s)} of it" for axis, wait_s in step.waited_s.items()]
    used = {action.kind for row in step.schedule.rows for action in row}
    kinds = [kind for kind in ActionKind if kind in used]

    def seconds(rank: int, kind: ActionKind) -> float:
        return sum(cost.predicted_s for (action, _), cost in step.ranks[rank].costs.items() if action is kind)

    rows = []
    for rank, of_rank in enumerate(step.ranks):
        times_s = (*(seconds(rank, kind) for kind in kinds), of_rank.update_s)
        rows.append((str(rank), str(len(of_rank.alone.sections)), *map(format_seconds, times_s)))
    columns = ["sections", *(kind.name.lower().replace("_", " ") for kind in kinds), "update"]
    title = "a micro-batch, by rank along pp" if len(step.ranks) > 1 else "a pass"
    stages = text_table(title, ["rank"], columns, rows)
    notes = Text("\n".join([NOT_VALIDATED, *zero_note(step.program)]))
    return [Text("\n".join(lines)), stages, ranks_table(step), axes_table(record), notes]


def _one_rank(analysis: Analysis, slowest: int) -> list[RenderableType]:
    facts, step = analysis.prediction, analysis.step
    title = f"{facts.program.name} on {step.budget.where}, {facts.level}: predicted, not measured; {PRICED_IN}"

    def share(seconds: float) -> tuple[str, str]:
        return format_seconds(seconds), f"{seconds / step.device_s:.0%}"

    by_kind, by_bound = step.device_s_by_kind.items(), step.device_s_by_bound.items()
    runs = {kind: sum(step.runs(each) for each in step.sections if each.kind is kind) for kind, _ in by_kind}
    kinds = [(kind, str(runs[kind]), *share(seconds)) for kind, seconds in by_kind]
    bounds = [(bound_text(step, bound), *share(seconds)) for bound, seconds in by_bound if seconds]
    by_kinds = text_table("by kind", ["kind"], ["sections", "predicted", "share"], kinds)
    by_bounds = text_table("by bound", ["bound"], ["predicted", "share"], bounds)
    head = [Text(title), Text(f"\n{analysis.headline}\n"), labelled(_head(analysis)), *advice_parts(analysis.advice)]
    tables = [by_kinds, by_bounds, *([_slowest_table(analysis, slowest)] if slowest else [])]
    return [*head, *tables, Text("\n".join(_notes(facts)))]


def _head(analysis: Analysis) -> list[tuple[str, str]]:
    facts, step, need, span = analysis.prediction, analysis.step, analysis.step.need, likely(analysis.prediction)
    of_step, of_device, of_host = map(format_seconds, (step.predicted_s, step.device_s, step.host_s))
    batch, capacity = _batch_text(step.batch_size, step.micro_steps), format_bytes(step.budget.capacity_bytes)
    kept, between = format_bytes(need.kept_bytes), format_bytes(need.between_bytes)
    rows = [
        (step_or_forward(facts), f"{of_step}, {batch}: {of_device} of the device, {of_host} of the host"),
        ("range", f"{span.range}, {span.basis}" if span else ""),
        ("speed", f"{format_rate(step.samples_per_s)} samples/s by one replica"),
        ("MFU", f"{analysis.mfu:.1%}: {analysis.mfu_text}"),
        ("roofs", analysis.roofs_text),
        ("memory", f"{format_bytes(need.size_bytes)} of {capacity}: {kept} kept, {between} between sections"),
        ("", f"{format_bytes(step.tiers.slow_bytes)} in DDR, because HBM is full" if step.tiers.slow_bytes else ""),
    ]
    rows = [row for row in rows if row[1]]
    if analysis.line_s:
        of_lines = f"{analysis.costliest_lines} of the device time, by the costliest line of each section"
        rows.insert(2, ("lines", of_lines))
    return rows


def _slowest_table(analysis: Analysis, count: int) -> Table:
    """Equal sections of repeated layers are one row, ranked by the time of all of them."""
    rows, sections = [], analysis.step.sections
    for fold in sorted(analysis.folds, key=lambda fold: -analysis.fold_s(fold))[:count]:
        row = _section_fields(analysis, fold[0])
        row["section"] = f"{fold[0]} x{len(fold)}" if len(fold) > 1 else fold[0]
        row["total_s"], row["runs"] = analysis.fold_s(fold), analysis.runs_in_step(fold)
        row["PCUs"], row["PMUs"] = f"{row['unit_share']:.0%}", f"{row['chip_share']:.0%}"
        row["bound_by"] = bound_text(analysis.step, sections[fold[0]].price.bound)
        rows.append(row)
    numbers = (
        "total_s, runs, predicted_s:each, PCUs, PMUs, bound_by, "
        "compute_s, memory_s, fill_s, launch_s, traffic_bytes, operators"
    )
    return table("slowest sections", rows, "section, costliest_line, kind, name", numbers, whole=("costliest_line",))


def bound_text(step: RankAlone, bound: Bound) -> str:
    if bound is Bound.MEMORY:
        return step.budget.memory
    return "capacity of the chip" if bound is Bound.CAPACITY else bound.value


def _most_replicas(facts: Prediction) -> int:
    """The largest number of replicas that sync; 1 without training."""
    return 1 if facts.program.training is None else max(step.replicas for step in facts.steps[SyncPath.RDU])


def _notes(facts: Prediction) -> list[str]:
    most = _most_replicas(facts)
    notes = [backing_of(facts.device, most)]
    if facts.alone.device_s_by_bound[Bound.LAUNCH] > facts.alone.device_s / 2:
        each = format_seconds(facts.alone.budget.launch_s)
        notes.append(f"most of the time is for section launches, {each} each: a larger batch costs little more time")
    if is_recurrent(facts):
        notes.append("recurrent layers are priced as products: the dependency of each time step on the last is ignored")
    if most > 1:
        cluster = f"{facts.cluster.name} (see sambasim devices)"
        notes += [
            f"links are those of cluster {cluster}, without congestion; a step waits for the slowest replica",
            *_node_notes(facts),
            "efficiency is relative to replicas that share the update and never wait",
            *zero_note(facts.program),
        ]
    elif facts.program.data_parallel:
        notes.append("this is one replica, without REDUCE and GATHER; --replicas 2,4,8 adds them")
    return notes


def _node_notes(facts: Prediction) -> Iterator[str]:
    rdus, steps = facts.cluster.rdus_per_node, facts.steps[SyncPath.RDU]
    if rdus > 1:
        fill = f"replicas fill one node of {rdus} RDUs after the other"
        yield f"{fill}; for smaller nodes, set rdus_per_node = 1 in a cluster file: --cluster FILE.toml"
    if any(step.replicas > 1 and step.placement.apart for step in steps):
        yield "by rdu, replicas on nodes of their own receive parameters while the next step begins; others wait"
