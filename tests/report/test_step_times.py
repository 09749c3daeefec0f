"""The table of a run's steps: measured and predicted times in columns of their own, and never a word for both."""

import pytest

from sambasim.cli.terminal import show
from sambasim.records.metrics import PredictedRecord, SummaryRecord
from sambasim.report.summaries import step_times
from tests.cli.test_demo import summary

PREDICTED = PredictedRecord(
    predicted_for="SN30",
    predicted_step_s=10e-3,
    predicted_samples_per_s=6400.0,
    predicted_host_s=5e-3,
    predicted_model_s=3e-3,
    predicted_update_s=1.5e-3,
    predicted_sync_s=0.5e-3,
    predicted_hidden_sync_s=0.0,
    predicted_by_kind_s={"FWD": 1e-3, "BCKWD": 2e-3, "OPT": 1.5e-3, "REDUCE": 0.5e-3},
    predicted_sync="host",
    predicted_backed_by="rows of somebody",
)


def run(**changes: object) -> SummaryRecord:
    """Four steps of 20 ms: 12 in the model, 6 in sync, 2 in the update."""
    fields = {"steps": 4, "training_s": 0.08, "model_s": 0.048, "sync_share": 0.3, "samples_per_s": 3200.0}
    return summary("host").model_copy(update={**fields, "predicted": PREDICTED, **changes})


def printed(record: SummaryRecord, capsys: pytest.CaptureFixture[str]) -> list[str]:
    show(*step_times(record))
    return [line for line in capsys.readouterr().out.splitlines() if line.strip()]


def cells(lines: list[str]) -> dict[str, list[str]]:
    rows = ([cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines)
    return {row[0]: row[1:] for row in rows if len(row) == 3}


def test_two_columns_and_what_backs_one_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(run(), capsys)
    assert cells(lines) == {
        "what": ["measured on this machine", "predicted for SN30"],
        "whole step": ["20.0 ms", "10.0 ms"],
        "forward and backward": ["12.0 ms", "3.0 ms"],
        "waiting for sync": ["6.0 ms", "500.0 us"],
        "update": ["2.0 ms", "1.5 ms"],
        "host: sections, inputs, outputs": ["-", "5.0 ms"],
        "samples/s": ["3.2 k", "6.4 k"],
    }
    assert lines[-1] == "predicted: rows of somebody"


def test_hidden_sync_has_a_row_where_there_is_any(capsys: pytest.CaptureFixture[str]) -> None:
    assert cells(printed(run(hidden_sync_s=0.004), capsys))["sync during the backward"] == ["1.0 ms", "0.0 us"]


def test_what_is_not_the_same_on_both_sides_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(run(emulated=True), capsys)
    assert lines[-2] == "measured: one process, which executed all 2 replicas in turn"
    lines = printed(run(host_sync="parameter-server"), capsys)
    assert lines[-1] == "predicted for a host sync by MPI, not by parameter-server"


def test_a_run_without_a_prediction_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(run(predicted=None, not_predicted="one replica needs too much"), capsys)
    assert lines == ["no prediction for a device: one replica needs too much"]
