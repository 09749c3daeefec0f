"""`summary.json`: what SambaTune says first of an app, from a prediction.

Its measured counterpart is apart: a run of the runtime on this machine's CPU says nothing of a device.
"""

from collections.abc import Mapping, Sequence

from pydantic import BaseModel, ConfigDict

from sambasim.hardware.budget import load_calibration
from sambasim.report.sections_csv import MeasuredSections
from sambasim.simulation.scaling import ScaledStep


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PredictedSummary(_Record):
    """The step of each of `replicas`, whose samples count together. `host_share` is a part of the latency; sections
    wait for gradients in `exposed_sync_s`."""

    device: str
    calibrated_on: str
    replicas: int
    batch_size: int
    micro_steps: int
    predicted_latency_s: float
    predicted_throughput_samples_per_s: float
    predicted_host_s: float
    predicted_host_share: float
    predicted_device_s: float
    predicted_exposed_sync_s: float
    predicted_latency_s_by_type: Mapping[str, float]
    predicted_latency_s_by_bound: Mapping[str, float]
    predicted_section_count: int


class MeasuredSummary(_Record):
    """Sections as they were timed one after another on this machine's CPU."""

    measured_sections_s: float
    measured_section_count: int


class SummaryOfApp(_Record):
    """`summary.json`. `remarks` are for people."""

    name: str
    remarks: tuple[str, ...]
    predicted: PredictedSummary
    measured: MeasuredSummary | None


def summary_json(scaled: ScaledStep, name: str, measured: Sequence[MeasuredSections] = ()) -> str:
    """Indented, with a line break at the end."""
    step = scaled.step
    host_share = step.host_s / scaled.predicted_s
    predicted = PredictedSummary(
        device=step.budget.where,
        calibrated_on=load_calibration().fit.rows,
        replicas=scaled.placement.replicas,
        batch_size=step.batch_size,
        micro_steps=step.micro_steps,
        predicted_latency_s=scaled.predicted_s,
        predicted_throughput_samples_per_s=scaled.samples_per_s,
        predicted_host_s=step.host_s,
        predicted_host_share=host_share,
        predicted_device_s=step.device_s,
        predicted_exposed_sync_s=scaled.exposed_sync_s,
        predicted_latency_s_by_type={kind.value: seconds for kind, seconds in step.device_s_by_kind.items()},
        predicted_latency_s_by_bound={bound.value: seconds for bound, seconds in step.device_s_by_bound.items()},
        predicted_section_count=len(step.sections),
    )
    remarks = [f"Host takes {host_share:.1%} of the total latency."]
    if scaled.path is not None:
        remarks.append(f"Sections wait for gradients in {scaled.sync_share:.1%} of it.")
    kind, seconds = max(step.device_s_by_kind.items(), key=lambda pair: pair[1])
    remarks.append(f"{kind} sections take {seconds / scaled.predicted_s:.1%} of it.")
    timed = MeasuredSummary(
        measured_sections_s=sum(one.measured_s for one in measured),
        measured_section_count=sum(len(one.sections) for one in measured),
    )
    summary = SummaryOfApp(
        name=name,
        remarks=tuple(f"{remark[:-1]} (predicted)." for remark in remarks),
        predicted=predicted,
        measured=timed if measured else None,
    )
    return summary.model_dump_json(indent=2) + "\n"
