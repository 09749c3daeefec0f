"""Predictions in the formats of other tools: a trace for Perfetto, and SambaNova's files and columns.

The trace has the format and tracks of `run --trace`: sections of a replica of one rank, or actions with their parts,
then update and sync. The others are SambaTune's `section_report.csv` and `summary.json`, and columns of `sntilestat`.
Not modelled: PMUs of a section, %chkpt, %quiesce; %pload and %aload are one number."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from sambasim import __version__
from sambasim.costs.price import chip_bytes
from sambasim.hardware.budget import load_calibration
from sambasim.ir.mesh import PIPELINE
from sambasim.ir.schedule import Action
from sambasim.records.trace import TraceProcess, TraceSpan, trace_json
from sambasim.records.trace import Track as Shown
from sambasim.report.analysis import NOT_VALIDATED
from sambasim.report.tables import csv_text, text_table
from sambasim.simulation.alone import MODEL_KINDS, RankAlone, TimedSection
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.scaling import Span, SyncedRank, Track
from sambasim.simulation.step import Cost, PredictedStep
from sambasim.units import format_seconds

_TRACKS = {Track.HOST: Shown.HOST, Track.SECTIONS: Shown.SECTIONS, Track.LINKS: Shown.COLLECTIVES}


def predicted_trace(step: PredictedStep) -> str:
    synced, world_size = step.synced, step.mesh.world_size
    shown = min(world_size, max(4, step.program.ranks_of_replica))  # all replicas do the same at the same time
    processes = []
    for at in step.placement.locations()[:shown]:
        if step.several_ranks:
            title = f"rank {at.replica} of {world_size} ({step.mesh.place(at.replica)}) as {at}, predicted"
            spans = list(_action_spans(step, step.mesh.coordinate(at.replica, PIPELINE)))
        else:
            title, spans = f"replica {at.replica} of {world_size}, {at}, predicted", list(_section_spans(synced))
        processes.append(TraceProcess(at.replica, title, spans))
    facts = {
        "kind": "predicted",
        "by": f"sambasim {__version__}",
        "pef": step.program.name,
        "pef_digest": None,
        "device": f"{step.alone.budget.where}: predicted, never measured here",
        "calibrated_on": load_calibration().fit.rows,
        "sync": "none" if synced.path is None else f"{synced.path}: {synced.way}",
        "predicted_s": step.predicted_s,
        "replicas": step.replicas,
        "replicas_shown": -(-shown // step.program.ranks_of_replica),
        "mesh": str(step.mesh),
        "schedule": step.schedule.name if step.program.schedule is not None else "none",
        "ranks_shown": shown,
    }
    return trace_json(processes, {**facts, "backed_by": NOT_VALIDATED} if step.several_ranks else facts)


def _section_spans(synced: SyncedRank) -> Iterator[TraceSpan]:
    micro_step = -1
    for span in synced.spans:
        micro_step += span.section == 0  # with which each micro-step begins
        args: dict[str, int | str] = {"kind": span.kind}
        if span.section is not None:
            section = synced.step.sections[span.section]
            args["section"] = span.section
            if synced.step.runs(section) > 1:
                args["micro_step"] = micro_step
            args |= {"read_bytes": section.load.read_bytes, "written_bytes": section.load.written_bytes}
            args["bound"] = section.price.bound
        yield _shown(span, args)


def _shown(span: Span, args: dict[str, int | str]) -> TraceSpan:
    title = span.name if span.track is Track.HOST else f"{span.kind} {span.name}"  # as in a measured trace
    return TraceSpan(_TRACKS[span.track], title, round(span.start_s * 1e9), round(span.stop_s * 1e9), args)


def _action_spans(step: PredictedStep, position: int) -> Iterator[TraceSpan]:
    for micro_step in range(step.micro_steps):
        began_s = micro_step * step.passes.predicted_s
        for action, start_s, stop_s in step.passes.timeline[position]:
            args: dict[str, int | str] = {"action": str(action), "stage": action.stage}
            args |= {"micro_batch": action.micro_batch, "micro_step": micro_step}
            start_ns, stop_ns = round((began_s + start_s) * 1e9), round((began_s + stop_s) * 1e9)
            yield TraceSpan(Shown.SECTIONS, title_of(action), start_ns, stop_ns, args)
            yield from _parts(step.passes.cost(action), began_s + start_s, stop_ns)
    for span in step.ranks[position].spans_after(step.passes_s):
        yield _shown(span, {"kind": span.kind})


def kind_of(action: Action) -> str:
    return action.kind.name.lower().replace("_", " ")


def title_of(action: Action) -> str:
    return f"{kind_of(action)} {action.micro_batch}, stage {action.stage}"


def _parts(cost: Cost, start_s: float, end_ns: int) -> Iterator[TraceSpan]:
    """The parts of an action; its messages, which are between its operators, before its sections."""
    parts: list[tuple[str, float, dict[str, int]]] = [("host", cost.host_s, {})]
    for axis, traffic in cost.messages.items():
        received = {f"{wire}_bytes": round(size_bytes) for wire, size_bytes in traffic.received_bytes.items()}
        parts.append((f"messages along {axis}", traffic.predicted_s, received))
    for name, seconds, args in [*parts, ("sections", cost.device_s, {})]:
        start_ns, start_s = round(start_s * 1e9), start_s + seconds
        if seconds:
            yield TraceSpan(Shown.SECTIONS, name, start_ns, min(round(start_s * 1e9), end_ns), args)


def section_report_csv(step: RankAlone) -> str:
    return csv_text([{"section_id": n, **_row(step, section)} for n, section in enumerate(step.sections)])


def _row(step: RankAlone, section: TimedSection) -> Mapping[str, str | int | float]:
    budget, price, load = step.budget, section.price, section.load
    memory, latency_s = budget.memory.lower(), price.predicted_s
    products_s = load.product_flops / (budget.units * budget.unit_flops_per_s)
    return {
        "section_type": section.kind,
        "section_name": section.name,
        "operators": section.load.stages,
        "runs_per_step": step.runs(section),
        "predicted_latency_s": latency_s,
        "predicted_throughput_samples_per_s": step.batch_size / latency_s if section.kind in MODEL_KINDS else "",
        f"predicted_{memory}_read_bytes_per_s": load.read_bytes / latency_s,
        f"predicted_{memory}_write_bytes_per_s": load.written_bytes / latency_s,
        "predicted_pcu_count": round(price.units),
        "predicted_pcu_utilization": products_s / latency_s,
        "predicted_pmu_utilization": min(1.0, chip_bytes(load, budget) / budget.chip_bytes),
        **{f"predicted_{part}_s": getattr(price, f"{part}_s") for part in ("compute", "memory", "fill", "launch")},
        "predicted_bound": price.bound,
    }


def summary_json(step: PredictedStep) -> str:
    """Of replicas of one rank."""
    synced, alone, replicas = step.synced, step.synced.step, step.placement.replicas
    host_share, by_kind = alone.host_s / synced.predicted_s, alone.device_s_by_kind
    predicted = {
        "device": alone.budget.where,
        "calibrated_on": load_calibration().fit.rows,
        "replicas": replicas,
        "batch_size": alone.batch_size,
        "micro_steps": alone.micro_steps,
        "predicted_latency_s": synced.predicted_s,
        "predicted_throughput_samples_per_s": replicas * alone.samples / synced.predicted_s,
        "predicted_host_s": alone.host_s,
        "predicted_host_share": host_share,
        "predicted_device_s": alone.device_s,
        "predicted_exposed_sync_s": synced.exposed_sync_s,
        "predicted_latency_s_by_type": by_kind,
        "predicted_latency_s_by_bound": alone.device_s_by_bound,
        "predicted_section_count": len(alone.sections),
    }
    kind, seconds = max(by_kind.items(), key=lambda pair: pair[1])
    waits = [f"Sections wait for gradients in {synced.sync_share:.1%} of it (predicted)."] * (synced.path is not None)
    most = f"{kind} sections take {seconds / synced.predicted_s:.1%} of it (predicted)."
    remarks = [f"Host takes {host_share:.1%} of the total latency (predicted).", *waits, most]
    record = {"name": step.program.name, "remarks": remarks, "predicted": predicted}
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


UNKNOWN = (
    "%pload+%aload is program load, argument load and idle time between two sections, which no publication separates",
    "%chkpt and %quiesce are not modelled; all tiles of a replica run the same section",
)


def tilestat(prediction: Prediction) -> Mapping[str, Any]:
    """The tiles of one replica, one row if their number is not published. Shares add up to 1; None is unknown."""
    step, tiles = prediction.alone, prediction.tiles or prediction.device.tiles
    launch_s = sum(step.runs(section) * section.price.launch_s for section in step.sections)
    shares = {
        "predicted_idle_share": step.host_s / step.predicted_s,
        "predicted_exec_share": (step.device_s - launch_s) / step.predicted_s,
        "predicted_pload_aload_share": launch_s / step.predicted_s,
        **dict.fromkeys(f"predicted_{name}_share" for name in ("pload", "aload", "chkpt", "quiesce")),
    }
    names = [f"TILE_{tile}" for tile in range(tiles)] if tiles else ["all"]
    return {
        "kind": "predicted",
        "name": prediction.program.name,
        "device": step.budget.where,
        "predicted_s": step.predicted_s,
        "tiles": [{"tile": name, **shares} for name in names],
        "unknown": UNKNOWN,
    }


def tilestat_view(prediction: Prediction) -> Sequence[RenderableType]:
    record, shares = tilestat(prediction), [f"predicted_{name}_share" for name in ("idle", "exec", "pload_aload")]
    heading = f"{record['name']} on {record['device']}, a step of {format_seconds(record['predicted_s'])}: predicted"
    rows = [(row["tile"], *(f"{100 * row[share]:.1f}" for share in shares)) for row in record["tiles"]]
    return [text_table(heading, ["tile"], ["%idle", "%exec", "%pload+%aload"], rows), Text("\n".join(UNKNOWN))]
