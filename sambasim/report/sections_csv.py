"""`section_report.csv`: a row for each section, with SambaTune's columns as far as there is something to say in them.

    section_id, section_type              its place in the step, and its kind
    …_latency_s, …_throughput_…           of one run of it; the throughput of sections that samples pass through
    …_ddr_read_…, …_ddr_write_…           rates with the memory beside the chip; of an SN40L they are `hbm`
    …_pcu_utilization                     share of the time of all compute units in which products need them, at the
                                          rate that a unit is calibrated to reach
    …_pmu_utilization                     share of the room on the chip that weights and buffers want

Columns that begin with `predicted_` are of the device; those that begin with `measured_` were measured on this
machine's CPU, and are empty where nobody measured. What was measured and has no counterpart, because the prediction is
cut for another device, or because sections ran as one pass, has a row of its own. How many PMUs a section takes is not
modelled.
"""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sambasim.costs.price import chip_bytes
from sambasim.ir.graph import Graph, Section, SectionKind
from sambasim.simulation.step import MODEL_KINDS, PredictedStep, TimedSection

_Row = Mapping[str, str | int | float]


@dataclass(frozen=True, slots=True)
class MeasuredSections:
    """What `sections` of a PEF took together on this machine, mostly one, as `measure_sections` tells it."""

    sections: tuple[Section, ...]
    measured_s: float


def measured_sections(graph: Graph, timed: Sequence[tuple[Sequence[int], float]]) -> list[MeasuredSections]:
    """What `measure_sections` found of `graph`: by the indices of the sections of each of its rows, their seconds."""
    return [MeasuredSections(tuple(graph.sections[index] for index in indices), time_s) for indices, time_s in timed]


def section_report_csv(step: PredictedStep, measured: Sequence[MeasuredSections] = ()) -> str:
    """The sections of `step`, and beside them those that were `measured` where they are the same ones."""
    rest = list(measured)
    rows: list[_Row] = []
    for number, section in enumerate(step.sections):
        found = next((one for one in rest if _is_same(one, section)), None)
        if found is not None:
            rest.remove(found)
        rows.append({"section_id": number, **_predicted(step, section), **_measured(step, found)})
    rows += [{"section_id": "", **_of_sections(one.sections), **_measured(step, one)} for one in rest]
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(step), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _columns(step: PredictedStep) -> Sequence[str]:
    memory = step.budget.memory.lower()
    return [
        "section_id", "section_type", "section_name", "operators", "runs_per_step",
        "predicted_latency_s", "predicted_throughput_samples_per_s",
        f"predicted_{memory}_read_bytes_per_s", f"predicted_{memory}_write_bytes_per_s",
        "predicted_pcu_count", "predicted_pcu_utilization", "predicted_pmu_utilization",
        "predicted_compute_s", "predicted_memory_s", "predicted_fill_s", "predicted_launch_s", "predicted_bound",
        "measured_latency_s", "measured_throughput_samples_per_s",
    ]  # fmt: skip


def _predicted(step: PredictedStep, section: TimedSection) -> _Row:
    budget, price, load = step.budget, section.price, section.load
    memory, latency_s = budget.memory.lower(), price.predicted_s
    products_s = load.product_flops / (budget.units * budget.unit_flops_per_s)
    through = {"predicted_throughput_samples_per_s": step.batch_size / latency_s}
    return {
        "section_type": section.kind,
        "section_name": section.name,
        "operators": section.operators,
        "runs_per_step": step.runs(section),
        "predicted_latency_s": latency_s,
        **(through if section.kind in MODEL_KINDS else {}),
        f"predicted_{memory}_read_bytes_per_s": load.read_bytes / latency_s,
        f"predicted_{memory}_write_bytes_per_s": load.written_bytes / latency_s,
        "predicted_pcu_count": budget.units,
        "predicted_pcu_utilization": products_s / latency_s,
        "predicted_pmu_utilization": min(1.0, chip_bytes(load) / budget.chip_bytes),
        "predicted_compute_s": price.compute_s,
        "predicted_memory_s": price.memory_s,
        "predicted_fill_s": price.fill_s,
        "predicted_launch_s": price.launch_s,
        "predicted_bound": price.bound,
    }


def _measured(step: PredictedStep, found: MeasuredSections | None) -> _Row:
    if found is None:
        return {}
    row = {"measured_latency_s": found.measured_s}
    if found.measured_s and all(section.kind in MODEL_KINDS for section in found.sections):
        row["measured_throughput_samples_per_s"] = step.batch_size / found.measured_s
    return row


def _of_sections(sections: Sequence[Section]) -> _Row:
    first, last = sections[0], sections[-1]
    return {
        "section_type": "+".join(dict.fromkeys(section.kind.value for section in sections)),
        "section_name": first.name if first is last else f"{first.name} … {last.name}",
    }


def _is_same(measured: MeasuredSections, section: TimedSection) -> bool:
    """Whether both are one section: the same operators of the graph, or the update of the same group."""
    if len(measured.sections) != 1 or measured.sections[0].kind is not section.kind:
        return False
    (one,) = measured.sections
    if section.kind in MODEL_KINDS:
        return (one.start, one.stop) == section.nodes
    return section.kind is SectionKind.GRADNORM or one.name.endswith(f"_{section.name}")
