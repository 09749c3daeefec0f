"""The trace of a prediction: well formed, told apart from a measured one, and as long as the prediction says."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.placement import place
from sambasim.hardware.spec import load_cluster, load_device
from sambasim.report.simulation import MOST_REPLICAS, predicted_trace
from sambasim.simulation.scaling import ScaledStep, scale
from sambasim.simulation.step import predict_step
from sambasim.simulation.sync import SyncPath
from tests.pef.samples import sample_program
from tests.support.trace_format import Trace, read_trace


def _scaled(replicas: int, path: SyncPath = SyncPath.RDU, micro_steps: int = 1) -> ScaledStep:
    device, program = load_device("sn30"), sample_program()
    alone = predict_step(program, budget_of(device, load_calibration(), 4), "o3", load_calibration(), None, micro_steps)
    return scale(program, alone, place(replicas, device, 4, load_cluster("sn30-8")), path)


@given(st.integers(1, 40), st.sampled_from(SyncPath), st.integers(1, 3))
@settings(max_examples=25)
def test_every_prediction_is_a_trace_that_ends_when_it_says(replicas: int, path: SyncPath, micro_steps: int) -> None:
    scaled = _scaled(replicas, path, micro_steps)
    trace = read_trace(predicted_trace(scaled, "logreg", "abc"))
    assert len(trace.processes) == min(replicas, MOST_REPLICAS)
    for replica in trace.processes:
        spans = [one for one in trace.spans if one.process == replica]
        assert len(spans) == len(scaled.spans)
        assert max(one.stop_ns for one in spans) == pytest.approx(scaled.predicted_s * 1e9, abs=1)
        model = [one for one in spans if one.name.startswith(("FWD", "BCKWD"))]
        last = max(one.args.get("micro_step", 0) for one in model)
        assert last == micro_steps - 1


def test_it_says_that_it_is_predicted_and_of_what() -> None:
    trace = read_trace(predicted_trace(_scaled(6), "logreg", "abc"))
    assert (trace.facts["kind"], trace.facts["pef"], trace.facts["pef_digest"]) == ("predicted", "logreg", "abc")
    assert trace.facts["device"] == "4 of 8 tiles of SN30: predicted, never measured here"
    assert (trace.facts["replicas"], trace.facts["replicas_shown"]) == (6, 4)
    assert list(trace.processes.values()) == [
        "replica 0 of 6, node 0 RDU 0 tiles 0-3, predicted",
        "replica 1 of 6, node 0 RDU 0 tiles 4-7, predicted",
        "replica 2 of 6, node 0 RDU 1 tiles 0-3, predicted",
        "replica 3 of 6, node 0 RDU 1 tiles 4-7, predicted",
    ]


def test_each_track_has_what_belongs_to_it() -> None:
    trace = read_trace(predicted_trace(_scaled(2), "logreg"))
    kinds = {track: {one.args["kind"] for one in trace.spans if one.track == track} for track in _tracks(trace)}
    assert kinds["host"] == {"HOST"}
    assert kinds["collectives"] == {"REDUCE", "GATHER"}
    assert kinds["sections"] == {"FWD", "BCKWD", "GRADNORM", "OPT"}
    (forward, *_) = trace.named("FWD", 0)
    assert forward.args["section"] == 0
    assert forward.args["read_bytes"] > 0


def _tracks(trace: Trace) -> set[str]:
    return {one.track for one in trace.spans}
