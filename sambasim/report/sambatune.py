"""Predictions in the formats of SambaNova's tools: SambaTune's `section_report.csv` and `summary.json`, and the columns
of `sntilestat`. Not modelled: PMUs of a section, %chkpt, %quiesce; %pload and %aload are one number."""

import json
from collections.abc import Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from sambasim.costs.load import chip_bytes
from sambasim.hardware.budget import load_calibration
from sambasim.report.tables import csv_text, text_table
from sambasim.simulation.alone import MODEL_KINDS, RankAlone, TimedSection
from sambasim.simulation.prediction import Prediction
from sambasim.simulation.scaling import SyncedRank
from sambasim.units import format_seconds

UNKNOWN = (
    "%pload+%aload is program load, argument load and idle time between two sections, which no publication separates",
    "%chkpt and %quiesce are not modelled; all tiles of a replica run the same section",
)


def section_report_csv(step: RankAlone) -> str:
    return csv_text([{"section_id": n, **_row(step, section)} for n, section in enumerate(step.sections)])


def _row(step: RankAlone, section: TimedSection) -> Mapping[str, str | int | float]:
    budget, price, load = step.budget, section.price, section.load
    memory, latency_s = budget.memory.lower(), price.predicted_s
    products_s = load.product_flops / (budget.units * budget.unit_flops_per_s)
    return {
        "section_type": section.kind,
        "section_name": section.name,
        "operators": section.operators,
        "runs_per_step": step.runs(section),
        "predicted_latency_s": latency_s,
        "predicted_throughput_samples_per_s": step.batch_size / latency_s if section.kind in MODEL_KINDS else "",
        f"predicted_{memory}_read_bytes_per_s": load.read_bytes / latency_s,
        f"predicted_{memory}_write_bytes_per_s": load.written_bytes / latency_s,
        "predicted_pcu_count": round(price.units),
        "predicted_pcu_utilization": products_s / latency_s,
        "predicted_pmu_utilization": min(1.0, chip_bytes(load, budget) / budget.chip_bytes),
        "predicted_compute_s": price.compute_s,
        "predicted_memory_s": price.memory_s,
        "predicted_fill_s": price.fill_s,
        "predicted_launch_s": price.launch_s,
        "predicted_bound": price.bound,
    }


def summary_json(scaled: SyncedRank, name: str) -> str:
    step = scaled.step
    host_share = step.host_s / scaled.predicted_s
    predicted = {
        "device": step.budget.where,
        "calibrated_on": load_calibration().fit.rows,
        "replicas": scaled.placement.replicas,
        "batch_size": step.batch_size,
        "micro_steps": step.micro_steps,
        "predicted_latency_s": scaled.predicted_s,
        "predicted_throughput_samples_per_s": scaled.samples_per_s,
        "predicted_host_s": step.host_s,
        "predicted_host_share": host_share,
        "predicted_device_s": step.device_s,
        "predicted_exposed_sync_s": scaled.exposed_sync_s,
        "predicted_latency_s_by_type": step.device_s_by_kind,
        "predicted_latency_s_by_bound": step.device_s_by_bound,
        "predicted_section_count": len(step.sections),
    }
    kind, seconds = max(step.device_s_by_kind.items(), key=lambda pair: pair[1])
    waits = f"Sections wait for gradients in {scaled.sync_share:.1%} of it (predicted)."
    remarks = [
        f"Host takes {host_share:.1%} of the total latency (predicted).",
        *([waits] if scaled.path is not None else []),
        f"{kind} sections take {seconds / scaled.predicted_s:.1%} of it (predicted).",
    ]
    record = {"name": name, "remarks": remarks, "predicted": predicted}
    return json.dumps(record, indent=2, ensure_ascii=False) + "\n"


def tilestat(prediction: Prediction) -> Mapping[str, object]:
    """What `sambasim tilestat --json` prints: the tiles of one replica, or one row if their number is not published.
    The shares add up to 1; None is unknown."""
    return {
        "kind": "predicted",
        "name": prediction.program.name,
        "device": prediction.alone.budget.where,
        "predicted_s": prediction.alone.predicted_s,
        "tiles": [{"tile": tile, **_shares(prediction)} for tile in _tiles(prediction)],
        "unknown": UNKNOWN,
    }


def _tiles(prediction: Prediction) -> list[str]:
    tiles = prediction.tiles or prediction.device.tiles
    return [f"TILE_{tile}" for tile in range(tiles)] if tiles else ["all"]


def _shares(prediction: Prediction) -> Mapping[str, float | None]:
    step = prediction.alone
    launch_s = sum(step.runs(section) * section.price.launch_s for section in step.sections)
    return {
        "predicted_idle_share": step.host_s / step.predicted_s,
        "predicted_exec_share": (step.device_s - launch_s) / step.predicted_s,
        "predicted_pload_aload_share": launch_s / step.predicted_s,
        **dict.fromkeys(f"predicted_{name}_share" for name in ("pload", "aload", "chkpt", "quiesce")),
    }


def tilestat_view(prediction: Prediction) -> Sequence[RenderableType]:
    name, step = prediction.program.name, prediction.alone
    heading = f"{name} on {step.budget.where}, a step of {format_seconds(step.predicted_s)}: predicted"
    shares = [f"{100 * share:.1f}" for share in _shares(prediction).values() if share is not None]
    rows = [(tile, *shares) for tile in _tiles(prediction)]
    return [text_table(heading, ["tile"], ["%idle", "%exec", "%pload+%aload"], rows), Text("\n".join(UNKNOWN))]
