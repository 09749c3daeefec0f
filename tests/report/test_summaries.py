"""What a run and `bench collectives` print at the end: times of the mean step, and times of an all-reduce."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from rich.console import Console

from sambasim.records.metrics import (
    CollectivesRecord,
    LeftOutRecord,
    PathRecord,
    PredictedRecord,
    SizeRecord,
    SummaryRecord,
)
from sambasim.report.summaries import collectives_plot, collectives_report, step_times
from sambasim.terminal.output import show
from sambasim.units import KIB, MIB
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
    show(*step_times(record, predicts=True))
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
    assert cells(printed(run(hidden_sync_s=0.004), capsys))["sync during the backward"] == ["1.0 ms", "0.0 us"]


@pytest.mark.parametrize(
    ("changes", "place", "note"),
    [
        ({"emulated": True}, -2, "measured: one process, which executed all 2 replicas in turn"),
        ({"host_sync": "parameter-server"}, -1, "predicted for a host sync by MPI, not by parameter-server"),
        ({"predicted": None, "not_predicted": "it needs too much"}, -1, "no predicted times: it needs too much"),
    ],
)
def test_what_is_not_the_same_on_both_sides_is_said(
    changes: dict[str, object], place: int, note: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(run(**changes), capsys)[place] == note
    show(*step_times(run()))
    shown = capsys.readouterr().out
    assert "measured on this machine" in shown
    assert "predict" not in shown


SVG = "{http://www.w3.org/2000/svg}"


def path(name: str, measured_s: float, size_bytes: int, copy_bound_s: float) -> PathRecord:
    rate = size_bytes / measured_s
    return PathRecord(
        path=name,
        result="mean" if name == "device" else "sum",
        checked="bits" if name == "device" else "rounding",
        measured_s=measured_s,
        least_s=measured_s,
        algorithm_bytes_per_s=rate,
        bus_bytes_per_s=1.5 * rate,
        to_copy_bound=measured_s / copy_bound_s,
    )


def size(size_bytes: int, device_s: float, gloo_s: float, copy_bound_s: float) -> SizeRecord:
    paths = (path("device", device_s, size_bytes, copy_bound_s), path("gloo", gloo_s, size_bytes, copy_bound_s))
    return SizeRecord(
        size_bytes=size_bytes, runs=3, copy_bytes=5 * size_bytes // 2, copy_bound_s=copy_bound_s, paths=paths
    )


RECORD = CollectivesRecord(
    world_size=4,
    node_of=(0, 0, 1, 1),
    threads=2,
    torch="2.13.0",
    mpi="MPICH 5.0.2",
    sizes=(size(4 * KIB, 1e-5, 2e-3, 5e-6), size(MIB, 4e-5, 3e-3, 3.2e-5)),
    left_out=(LeftOutRecord(size_bytes=64 * MIB, reason="not [enough] shared memory"),),
)


def bench_lines(record: CollectivesRecord) -> list[str]:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(collectives_report(record))
    return [" ".join(line.split()) for line in captured.get().splitlines()]


def test_the_table_has_a_line_for_each_path_and_each_bound() -> None:
    lines = bench_lines(RECORD)
    assert lines[0] == "all-reduce, measured: 4 ranks on 2 nodes, 2 threads a rank, MPICH 5.0.2, torch 2.13.0"
    assert "4.0 KiB device 10.0 us 0.41 0.614 2.00 mean, equal bits" in lines
    assert "gloo 3.0 ms 0.35 0.524 93.75 sum, within rounding" in lines
    assert "1.0 MiB device 40.0 us 26.21 39.32 1.25 mean, equal bits" in lines
    assert "copy bound 32.0 us 1.00 2.5 MiB by all ranks" in lines
    assert "left out: 64.0 MiB: not [enough] shared memory" in lines


def test_the_plot_has_a_line_for_each_path_with_its_name_at_the_end() -> None:
    root = ElementTree.fromstring(collectives_plot(RECORD))
    lines = {line.get("stroke"): line for line in root.iter(f"{SVG}polyline")}
    words = {text.text: text for text in root.iter(f"{SVG}text")}
    assert len(lines) == 3
    assert {"4 KiB", "1 MiB", "size of the buffer, bytes", "time, seconds", "10 us", "100 us"} <= set(words)
    for name in ("device", "gloo", "copy bound"):
        points = lines[words[name].get("fill")].get("points", "").split()
        assert len(points) == 2
        assert float(words[name].get("x", "")) > float(points[-1].split(",")[0])
    heights = [float(words[name].get("y", "")) for name in ("gloo", "device", "copy bound")]
    assert heights == sorted(heights)
    assert all(lower - upper >= 15 for upper, lower in pairwise(heights))
