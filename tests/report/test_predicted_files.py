"""What a prediction writes: SambaTune's files with their columns and sums, and a trace that is as long as the step."""

import csv
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sambasim.hardware.budget import budget_of
from sambasim.hardware.placement import place
from sambasim.hardware.spec import load_cluster, load_device
from sambasim.report.formats import predicted_trace, section_report_csv, summary_json
from sambasim.simulation.step import PredictedStep, predict_step
from sambasim.simulation.sync import SyncPath
from tests.pef.samples import sample_program
from tests.support.trace_format import read_trace


def step_of(replicas: int = 1, path: SyncPath = SyncPath.RDU, micro_steps: int = 1) -> PredictedStep:
    device = load_device("sn30")
    placement = place(replicas, device, 4, load_cluster("sn30-8"))
    return predict_step(sample_program(), budget_of(device, 4), placement, path, micro_steps, "o3")


def test_a_row_for_each_section_is_within_the_device_and_their_sum_is_the_step() -> None:
    step = step_of(micro_steps=3).alone
    rows = list(csv.DictReader(io.StringIO(section_report_csv(step))))
    heads = [(str(number), section.kind) for number, section in enumerate(step.sections)]
    assert [(row["section_id"], row["section_type"]) for row in rows] == heads
    total_s = sum(float(row["predicted_latency_s"]) * int(row["runs_per_step"]) for row in rows)
    assert total_s == pytest.approx(step.device_s)
    for row, section in zip(rows, step.sections, strict=True):
        parts = [float(row[f"predicted_{part}_s"]) for part in ("compute", "memory", "fill", "launch")]
        assert float(row["predicted_latency_s"]) == pytest.approx(max(parts[:2]) + sum(parts[2:]))
        rates = [float(row[f"predicted_ddr_{way}_bytes_per_s"]) for way in ("read", "write")]
        assert sum(rates) <= step.budget.memory_bytes_per_s
        assert sum(rates) * section.price.predicted_s == pytest.approx(section.load.traffic_bytes)
        assert 0 <= float(row["predicted_pcu_utilization"]) <= 1
        assert 0 <= float(row["predicted_pmu_utilization"]) <= 1
        assert int(row["predicted_pcu_count"]) == round(section.price.units) <= 640
    products = {row["section_type"] for row in rows if float(row["predicted_pcu_utilization"]) > 0}
    assert products == {"FWD", "BCKWD"}


def test_the_parts_of_the_summary_add_up() -> None:
    synced = step_of(replicas=4).synced
    told = json.loads(summary_json(synced, "digits"))
    predicted = told["predicted"]
    assert told["remarks"][0] == f"Host takes {predicted['predicted_host_share']:.1%} of the total latency (predicted)."
    parts_s = [predicted[f"predicted_{part}_s"] for part in ("host", "device", "exposed_sync")]
    assert predicted["predicted_latency_s"] == pytest.approx(sum(parts_s))
    for kind in ("type", "bound"):
        assert sum(predicted[f"predicted_latency_s_by_{kind}"].values()) == pytest.approx(parts_s[1])
    assert predicted["predicted_throughput_samples_per_s"] == pytest.approx(synced.samples_per_s)


@given(st.integers(1, 40), st.sampled_from(SyncPath), st.integers(1, 3))
@settings(max_examples=25)
def test_every_prediction_is_a_trace_that_ends_when_it_says(replicas: int, path: SyncPath, micro_steps: int) -> None:
    step = step_of(replicas, path, micro_steps)
    trace = read_trace(predicted_trace(step))
    assert len(trace.processes) == min(replicas, 4)
    for replica in trace.processes:
        spans = trace.named("", replica)
        assert len(spans) == len(step.synced.spans)
        assert max(span.stop_ns for span in spans) == pytest.approx(step.predicted_s * 1e9, abs=1)
        model = [span for span in spans if span.name.startswith(("FWD", "BCKWD"))]
        assert max(span.args.get("micro_step", 0) for span in model) == micro_steps - 1


def test_a_trace_says_that_it_is_predicted_and_of_what() -> None:
    trace = read_trace(predicted_trace(step_of(6)))
    assert (trace.facts["kind"], trace.facts["pef"], trace.facts["pef_digest"]) == ("predicted", "logreg", None)
    assert trace.facts["device"] == "4 of 8 tiles of SN30: predicted, never measured here"
    assert (trace.facts["replicas"], trace.facts["replicas_shown"]) == (6, 4)
    places = ("RDU 0 tiles 0-3", "RDU 0 tiles 4-7", "RDU 1 tiles 0-3", "RDU 1 tiles 4-7")
    titles = [f"replica {replica} of 6, node 0 {place}, predicted" for replica, place in enumerate(places)]
    assert list(trace.processes.values()) == titles
