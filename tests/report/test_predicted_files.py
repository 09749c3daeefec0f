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
from sambasim.report.sambatune import section_report_csv, summary_json
from sambasim.report.trace import predicted_trace
from sambasim.simulation.scaling import SyncedRank
from sambasim.simulation.step import PredictedStep, predict_step
from sambasim.simulation.sync import SyncPath
from tests.pef.samples import sample_program
from tests.support.trace_format import read_trace

Rows = list[dict[str, str]]


def _step(replicas: int = 1, path: SyncPath = SyncPath.RDU, micro_steps: int = 1) -> PredictedStep:
    device = load_device("sn30")
    placement = place(replicas, device, 4, load_cluster("sn30-8"))
    budget = budget_of(device, 4)
    return predict_step(sample_program(), budget, placement, path, micro_steps, "o3")


def _scaled(replicas: int = 1, micro_steps: int = 1) -> SyncedRank:
    return _step(replicas, micro_steps=micro_steps).synced


def _rows(scaled: SyncedRank) -> Rows:
    return list(csv.DictReader(io.StringIO(section_report_csv(scaled.step))))


def test_a_row_for_each_section_and_their_sum_is_the_step() -> None:
    scaled = _scaled(micro_steps=3)
    rows = _rows(scaled)
    assert [row["section_id"] for row in rows] == [str(number) for number in range(len(scaled.step.sections))]
    assert [row["section_type"] for row in rows] == [section.kind for section in scaled.step.sections]
    total = sum(float(row["predicted_latency_s"]) * int(row["runs_per_step"]) for row in rows)
    assert total == pytest.approx(scaled.step.device_s)
    for row in rows:
        parts = [float(row[f"predicted_{part}_s"]) for part in ("compute", "memory", "fill", "launch")]
        assert float(row["predicted_latency_s"]) == pytest.approx(max(parts[:2]) + sum(parts[2:]))


def test_rates_and_shares_are_within_what_the_device_has() -> None:
    scaled = _scaled()
    budget = scaled.step.budget
    for row, section in zip(_rows(scaled), scaled.step.sections, strict=True):
        rates = [float(row[f"predicted_ddr_{way}_bytes_per_s"]) for way in ("read", "write")]
        assert sum(rates) <= budget.memory_bytes_per_s
        assert sum(rates) * section.price.predicted_s == pytest.approx(section.load.traffic_bytes)
        assert 0 <= float(row["predicted_pcu_utilization"]) <= 1
        assert 0 <= float(row["predicted_pmu_utilization"]) <= 1
        assert int(row["predicted_pcu_count"]) == round(section.price.units) <= 640
    products = [row for row in _rows(scaled) if float(row["predicted_pcu_utilization"]) > 0]
    assert {row["section_type"] for row in products} == {"FWD", "BCKWD"}


def test_the_parts_of_the_summary_add_up() -> None:
    scaled = _scaled(replicas=4)
    told = json.loads(summary_json(scaled, "digits"))
    predicted = told["predicted"]
    assert told["remarks"][0] == f"Host takes {predicted['predicted_host_share']:.1%} of the total latency (predicted)."
    assert predicted["predicted_latency_s"] == pytest.approx(
        predicted["predicted_host_s"] + predicted["predicted_device_s"] + predicted["predicted_exposed_sync_s"]
    )
    assert sum(predicted["predicted_latency_s_by_type"].values()) == pytest.approx(predicted["predicted_device_s"])
    assert sum(predicted["predicted_latency_s_by_bound"].values()) == pytest.approx(predicted["predicted_device_s"])
    assert predicted["predicted_throughput_samples_per_s"] == pytest.approx(scaled.samples_per_s)


@given(st.integers(1, 40), st.sampled_from(SyncPath), st.integers(1, 3))
@settings(max_examples=25)
def test_every_prediction_is_a_trace_that_ends_when_it_says(replicas: int, path: SyncPath, micro_steps: int) -> None:
    step = _step(replicas, path, micro_steps)
    trace = read_trace(predicted_trace(step))
    assert len(trace.processes) == min(replicas, 4)
    for replica in trace.processes:
        spans = [one for one in trace.spans if one.process == replica]
        assert len(spans) == len(step.synced.spans)
        assert max(one.stop_ns for one in spans) == pytest.approx(step.predicted_s * 1e9, abs=1)
        model = [one for one in spans if one.name.startswith(("FWD", "BCKWD"))]
        last = max(one.args.get("micro_step", 0) for one in model)
        assert last == micro_steps - 1


def test_it_says_that_it_is_predicted_and_of_what() -> None:
    trace = read_trace(predicted_trace(_step(6)))
    assert (trace.facts["kind"], trace.facts["pef"], trace.facts["pef_digest"]) == ("predicted", "logreg", None)
    assert trace.facts["device"] == "4 of 8 tiles of SN30: predicted, never measured here"
    assert (trace.facts["replicas"], trace.facts["replicas_shown"]) == (6, 4)
    assert list(trace.processes.values()) == [
        "replica 0 of 6, node 0 RDU 0 tiles 0-3, predicted",
        "replica 1 of 6, node 0 RDU 0 tiles 4-7, predicted",
        "replica 2 of 6, node 0 RDU 1 tiles 0-3, predicted",
        "replica 3 of 6, node 0 RDU 1 tiles 4-7, predicted",
    ]
