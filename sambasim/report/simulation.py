"""The output of `sambasim simulate`: tables, JSON, CSV, a plot, and a trace with the format and tracks of `run
--trace`. Everything is predicted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from sambasim import __version__
from sambasim.costs.price import Bound
from sambasim.hardware.budget import load_calibration
from sambasim.records import Record
from sambasim.records.trace import TraceProcess, TraceSpan, trace_json
from sambasim.records.trace import Track as Shown
from sambasim.report.advice import PRICED_IN, advice_fields, advice_parts
from sambasim.report.findings import Findings, mfu, mfu_text, model_flops, published, range_text, reachable, roofs_text
from sambasim.report.output import Curve, add_row, json_line, labelled, plain_table, speed_chart
from sambasim.simulation.prediction import Prediction, backing_of, is_recurrent, likely, zero_note
from sambasim.simulation.scaling import ScaledStep, Span, Track
from sambasim.simulation.step import PredictedStep
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_bytes, format_rate, format_seconds


class ScalingRecord(Record):
    """One number of replicas with one way to sync; `sync` is None for one replica. The efficiency is
    relative to replicas that share the update and never wait."""

    batch_size: int
    replicas: int
    nodes: int
    sync: str | None
    predicted_s: float
    predicted_samples_per_s: float
    predicted_efficiency: float
    predicted_exposed_sync_s: float
    predicted_hidden_sync_s: float
    predicted_sync_share: float
    bytes_per_rdu: int
    way: str


def simulation_json(found: Findings, paths: Sequence[SyncPath]) -> str:
    """What `sambasim simulate --json` prints for one batch size."""
    facts, alone = found.prediction, found.step
    span = likely(facts)
    record = {
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
        "headline": found.headline,
        "model_flops": model_flops(facts),
        "predicted_mfu": mfu(facts),
        "roofs": {"reachable": asdict(reachable(facts)), "published": asdict(published(facts))},
        **advice_fields(found.advice),
        "scaling": [record.model_dump() for record in scaling_records(facts, paths)],
        "lines": [{"line": line, "predicted_s": seconds} for line, seconds in found.line_s.items()],
        "tensors": [{"from": a, "to": b, "bytes": size} for (a, b), size in sorted(found.stages.tensors.items())],
        "sections": [_section_fields(found, number) for number in range(len(alone.sections))],
    }
    return json_line(record)


def simulation_report(found: Findings, slowest: int) -> list[RenderableType]:
    facts, step = found.prediction, found.step
    title = f"{facts.program.name} on {step.budget.where}, {facts.level}: predicted, not measured; {PRICED_IN}"
    parts: list[RenderableType] = [Text(title), Text(f"\n{found.headline}\n"), labelled(_head(found))]
    kinds = plain_table("by kind", ["kind"], ["sections", "predicted", "share"])
    for kind, seconds in step.device_s_by_kind.items():
        count = sum(step.runs(section) for section in step.sections if section.kind is kind)
        add_row(kinds, kind, str(count), format_seconds(seconds), f"{seconds / step.device_s:.0%}")
    bounds = plain_table("by bound", ["bound"], ["predicted", "share"])
    for bound, seconds in step.device_s_by_bound.items():
        if seconds:
            add_row(bounds, bound_text(step, bound), format_seconds(seconds), f"{seconds / step.device_s:.0%}")
    parts += [*advice_parts(found.advice), kinds, bounds]
    if slowest:
        parts.append(_slowest_table(found, slowest))
    return [*parts, Text("\n".join(_notes(facts)))]


def _head(found: Findings) -> list[tuple[str, str]]:
    facts, step = found.prediction, found.step
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
    if found.line_s:
        rows.insert(2, ("lines", f"{found.costliest_lines} of the device time, by the costliest line of each section"))
    if step.tiers.slow_bytes:
        rows.append(("", f"{format_bytes(step.tiers.slow_bytes)} in DDR, because HBM is full"))
    return rows


def _slowest_table(found: Findings, count: int) -> RenderableType:
    """Equal sections of repeated layers are one row, ranked by the time of all of them."""
    step = found.step
    table = plain_table(
        "slowest sections",
        ["section", "costliest line", "kind", "name"],
        [
            "total",
            "runs",
            "each",
            "PCUs",
            "PMUs",
            "bound by",
            "compute",
            "memory",
            "fill",
            "launch",
            "traffic",
            "operators",
        ],
    )
    table.columns[1].no_wrap = True
    for fold in sorted(found.folds, key=lambda one: -found.fold_s(one))[:count]:
        number, runs = fold.numbers[0], found.runs_in_step(fold)
        section, more = step.sections[number], f" x{len(fold.numbers)}" if len(fold.numbers) > 1 else ""
        price = section.price
        times = map(format_seconds, (price.compute_s, price.memory_s, price.fill_s, price.launch_s))
        numbers = (
            *(format_seconds(found.fold_s(fold)), str(runs), format_seconds(price.predicted_s)),
            *(f"{section.unit_share:.0%}", f"{section.chip_share:.0%}", bound_text(step, price.bound), *times),
            *(format_bytes(section.load.traffic_bytes), str(section.operators)),
        )
        add_row(table, f"{number}{more}", found.lines[number], section.kind, section.name, *numbers)
    return table


def bound_text(step: PredictedStep, bound: Bound) -> str:
    if bound is Bound.MEMORY:
        return step.budget.memory
    return "capacity of the chip" if bound is Bound.CAPACITY else bound.value


def _section_fields(found: Findings, number: int) -> Mapping[str, object]:
    section = found.step.sections[number]
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
        "costliest_line": found.lines[number] or None,
        "fold": found.fold_of[number],
    }


def _most_replicas(facts: Prediction) -> int:
    """The largest number of replicas that sync; 1 without training."""
    if facts.program.training is None:
        return 1
    return max(step.placement.replicas for steps in facts.scaled.values() for step in steps)


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


def scaling_records(prediction: Prediction, paths: Sequence[SyncPath]) -> tuple[ScalingRecord, ...]:
    rows = []
    for steps in zip(*(prediction.scaled[path] for path in paths), strict=True):
        rows += [_scaling_record(prediction.alone, step) for step in (steps if steps[0].path else steps[:1])]
    return tuple(rows)


def _scaling_record(alone: PredictedStep, scaled: ScaledStep) -> ScalingRecord:
    return ScalingRecord(
        batch_size=alone.batch_size,
        replicas=scaled.placement.replicas,
        nodes=scaled.placement.nodes,
        sync=scaled.path,
        predicted_s=scaled.predicted_s,
        predicted_samples_per_s=scaled.samples_per_s,
        predicted_efficiency=scaled.efficiency,
        predicted_exposed_sync_s=scaled.exposed_sync_s,
        predicted_hidden_sync_s=scaled.hidden_sync_s,
        predicted_sync_share=scaled.sync_share,
        bytes_per_rdu=alone.need.size_bytes * scaled.placement.on_an_rdu,
        way=scaled.way,
    )


def scaling_table(records: Sequence[ScalingRecord]) -> Table:
    numbers = ["step", "samples/s", "efficiency", "sync waits", "share", "hidden", "memory of an RDU"]
    table = plain_table("replicas, predicted", ["batch", "replicas", "nodes", "sync"], numbers)
    for record in records:
        add_row(
            table,
            *(str(record.batch_size), str(record.replicas), str(record.nodes), record.sync or ""),
            format_seconds(record.predicted_s),
            format_rate(record.predicted_samples_per_s),
            f"{record.predicted_efficiency:.1%}",
            format_seconds(record.predicted_exposed_sync_s),
            f"{record.predicted_sync_share:.1%}",
            format_seconds(record.predicted_hidden_sync_s),
            format_bytes(record.bytes_per_rdu),
        )
    return table


def scaling_plot(title: str, records: Sequence[ScalingRecord]) -> str:
    """Samples/s over replicas as an SVG: a curve for each batch size and way to sync, and the ideal without sync. The
    record of one replica is the first point of every curve of its batch size."""
    ways = dict.fromkeys((record.batch_size, record.sync) for record in records if record.sync)
    curves = []
    for batch_size, sync in ways:
        rows = [row for row in records if row.batch_size == batch_size and row.sync in (None, sync)]
        points = [(row.replicas, row.predicted_samples_per_s) for row in rows]
        curves.append(Curve(f"{sync}, batch {batch_size}", sorted(points)))
    for batch_size in dict.fromkeys(record.batch_size for record in records):
        rows = [row for row in records if row.batch_size == batch_size]
        ideal = {row.replicas: row.predicted_samples_per_s / row.predicted_efficiency for row in rows}
        curves.append(Curve(f"no sync, batch {batch_size}", sorted(ideal.items()), is_bound=True))
    return speed_chart(title, "replicas", curves)


MOST_SHOWN = 4
"""The most replicas in a trace. All do the same at the same time."""

_NS_PER_S = 1e9
SHOWN_TRACKS = {Track.HOST: Shown.HOST, Track.SECTIONS: Shown.SECTIONS, Track.LINKS: Shown.COLLECTIVES}


def predicted_trace(scaled: ScaledStep, name: str) -> str:
    placement = scaled.placement
    shown = min(placement.replicas, MOST_SHOWN)
    spans = list(_trace_spans(scaled))
    processes = [
        TraceProcess(at.replica, f"replica {at.replica} of {placement.replicas}, {at}, predicted", spans)
        for at in placement.locations()[:shown]
    ]
    facts = predicted_facts(name, scaled, scaled.predicted_s)
    return trace_json(processes, {**facts, "replicas": placement.replicas, "replicas_shown": shown})


def predicted_facts(name: str, scaled: ScaledStep, predicted_s: float) -> Mapping[str, object]:
    return {
        "kind": "predicted",
        "by": f"sambasim {__version__}",
        "pef": name,
        "pef_digest": None,
        "device": f"{scaled.step.budget.where}: predicted, never measured here",
        "calibrated_on": load_calibration().fit.rows,
        "sync": "none" if scaled.path is None else f"{scaled.path}: {scaled.way}",
        "predicted_s": predicted_s,
    }


def _trace_spans(scaled: ScaledStep) -> Iterator[TraceSpan]:
    micro_step = -1
    for span in scaled.spans:
        # Each micro-step begins with section 0.
        micro_step += span.section == 0
        args: dict[str, int | str] = {"kind": span.kind}
        if span.section is not None:
            section = scaled.step.sections[span.section]
            args["section"] = span.section
            if scaled.step.runs(section) > 1:
                args["micro_step"] = micro_step
            args |= {"read_bytes": section.load.read_bytes, "written_bytes": section.load.written_bytes}
            args["bound"] = section.price.bound
        title = title_of_span(span)
        yield TraceSpan(SHOWN_TRACKS[span.track], title, nanoseconds(span.start_s), nanoseconds(span.stop_s), args)


def title_of_span(span: Span) -> str:
    """Kind and name, as in a measured trace."""
    return span.name if span.track is Track.HOST else f"{span.kind} {span.name}"


def nanoseconds(time_s: float) -> int:
    return round(time_s * _NS_PER_S)
