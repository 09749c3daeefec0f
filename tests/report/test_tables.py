"""What a run and `bench collectives` print at the end; and tables, on terminals of any width and as other formats."""

import json
import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest

from sambasim.records.metrics import (
    CollectivesRecord,
    LeftOutRecord,
    PathRecord,
    PredictedRecord,
    SizeRecord,
    SummaryRecord,
)
from sambasim.report.page import ui
from sambasim.report.summaries import collectives_plot, collectives_report, step_times
from sambasim.report.tables import Table, Tables, csv_text, json_line, table, text_of, text_table
from sambasim.simulation.prediction import PRICED_IN
from sambasim.terminal.output import show
from sambasim.units import KIB, MIB
from tests.report.test_inspect_report import printed as drawn
from tests.support.summaries import summary

PREDICTED = PredictedRecord(
    predicted_for="SN30", predicted_step_s=10e-3, predicted_samples_per_s=6400.0, predicted_host_s=5e-3,
    predicted_model_s=3e-3, predicted_update_s=1.5e-3, predicted_sync_s=0.5e-3, predicted_hidden_sync_s=0.0,
    predicted_by_kind_s={"FWD": 1e-3, "BCKWD": 2e-3, "OPT": 1.5e-3, "REDUCE": 0.5e-3}, predicted_sync="host",
    predicted_backed_by="rows of somebody",
)  # fmt: skip


def run(**changes: object) -> SummaryRecord:
    """Four steps of 20 ms: 12 in the model, 6 in sync, 2 in the update."""
    fields = {"steps": 4, "training_s": 0.08, "model_s": 0.048, "sync_share": 0.3, "samples_per_s": 3200.0}
    return summary("host").model_copy(update={**fields, "predicted": PREDICTED, **changes})


def printed(record: SummaryRecord, capsys: pytest.CaptureFixture[str]) -> list[str]:
    show(*step_times(record, predicts=True))
    return [line for line in capsys.readouterr().out.splitlines() if line.strip()]


def test_two_columns_and_what_backs_one_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    def cells(lines: list[str]) -> dict[str, list[str]]:
        rows = ([cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines)
        return {row[0]: row[1:] for row in rows if len(row) == 3}

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
    assert lines[-1] == f"predicted: {PRICED_IN}; rows of somebody"
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


def size(size_bytes: int, device_s: float, gloo_s: float, copy_bound_s: float) -> SizeRecord:
    paths = [
        PathRecord(
            path=name, result=result, checked=checked, measured_s=seconds, least_s=seconds,
            algorithm_bytes_per_s=size_bytes / seconds, bus_bytes_per_s=1.5 * size_bytes / seconds,
            to_copy_bound=seconds / copy_bound_s,
        )
        for name, result, checked, seconds in (
            ("device", "mean", "bits", device_s), ("gloo", "sum", "rounding", gloo_s)
        )
    ]  # fmt: skip
    copied = {"copy_bytes": 5 * size_bytes // 2, "copy_bound_s": copy_bound_s}
    return SizeRecord.model_validate({"size_bytes": size_bytes, "runs": 3, "paths": paths, **copied})


RECORD = CollectivesRecord(
    world_size=4, node_of=(0, 0, 1, 1), threads=2, torch="2.13.0", mpi="MPICH 5.0.2",
    sizes=(size(4 * KIB, 1e-5, 2e-3, 5e-6), size(MIB, 4e-5, 3e-3, 3.2e-5)),
    left_out=(LeftOutRecord(size_bytes=64 * MIB, reason="not [enough] shared memory"),),
)  # fmt: skip


def test_the_table_has_a_line_for_each_path_and_each_bound() -> None:
    first, *lines = [" ".join(line.split()) for line in drawn(collectives_report(RECORD)).splitlines()]
    assert first == "all-reduce, measured: 4 ranks on 2 nodes, 2 threads a rank, MPICH 5.0.2, torch 2.13.0"
    assert {
        "4.0 KiB device 10.0 us 0.41 0.614 2.00 mean, equal bits",
        "gloo 3.0 ms 0.35 0.524 93.75 sum, within rounding",
        "1.0 MiB device 40.0 us 26.21 39.32 1.25 mean, equal bits",
        "copy bound 32.0 us 1.00 2.5 MiB by all ranks",
        "left out: 64.0 MiB: not [enough] shared memory",
    } <= set(lines)


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


def drawn_lines(shown: Table, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = str(Tables([shown], None)).splitlines()
    assert max(map(len, lines)) <= width
    return lines


@pytest.mark.parametrize(("width", "left_out"), [(120, []), (100, []), (60, ["traffic"]), (42, ["compute", "traffic"])])
def test_a_table_leaves_out_its_last_numbers_rather_than_cut_them(
    width: int, left_out: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ["FWD", "a_section_with_a_long_name_of_its_own", "510.3 us", "48.8 us", "1,234,567.8 KiB"]
    steps = text_table("steps", ["kind", "name"], ["predicted", "compute", "traffic"], [row])
    lines = drawn_lines(steps, width, monkeypatch)
    text = "".join(lines).replace(" ", "")
    assert ("1,234,567.8KiB" in text, "48.8us" in text) == ("traffic" not in left_out, "compute" not in left_out)
    notes = [line for line in lines if line.startswith("for a wider terminal: ")]
    assert notes == ([f"for a wider terminal: {', '.join(left_out)}"] if left_out else [])
    assert "510.3us" in text


@pytest.mark.parametrize(
    ("columns", "numbers", "whole"), [(100, 4, True), (80, 3, True), (64, 3, False), (40, 1, False)]
)
def test_whole_words_stay_where_three_numbers_have_room_beside_them(
    columns: int, numbers: int, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "a/module/of/mine.py:1234"
    numbers_of = {"total_s": 1.0, "runs": 36, "each_s": 0.0278, "traffic_bytes": 123 << 20}
    row = {"line": line, "name": "a_name_that_is_long_enough_to_be_folded", **numbers_of}
    slowest = table("slowest", [row], "line, name", "total_s, runs, each_s, traffic_bytes", whole=("line",))
    lines = drawn_lines(slowest, columns, monkeypatch)
    heads = [head for head in ("total", "runs", "each", "traffic") if head in lines[2]]
    assert heads == ["total", "runs", "each", "traffic"][:numbers]
    assert (line in "\n".join(lines)) == whole
    pieces = [text.split()[0] for text in lines[4:] if text[:2].strip()]
    assert "".join(pieces).startswith(line), "folded, and not clipped"


def test_the_unit_at_the_end_of_a_name_is_the_format() -> None:
    fields = {"step_s": 0.0123, "size_bytes": 1536, "host_share": 0.125, "samples_per_s": 12345.0, "count": 7}
    texts = [text_of(*field) for field in (fields | {"stages": (0, 2), "sync": None, "change_s": "as asked"}).items()]
    assert texts == ["12.3 ms", "1.5 KiB", "12.5%", "12.3 k", "7", "0, 2", "", "as asked"]


def test_terminal_page_csv_and_json_show_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"name": "[b]<i>", "kind": "FWD", "predicted_s": 0.5, "why": "it is slow"}]
    shown = table("sections", rows, "name:section, kind", "predicted_s", "why")
    lines = drawn_lines(shown, 80, monkeypatch)
    assert lines[0] == "sections"
    assert [line.split() for line in (lines[2], lines[4])] == [
        ["section", "kind", "predicted", "why"],
        ["[b]<i>", "FWD", "500.0", "ms", "it", "is", "slow"],
    ]
    assert '<td title="[b]&lt;i&gt;">[b]&lt;i&gt;</td><td title="FWD">FWD</td><td class="number">500.0 ms</td>' in (
        ui.table(shown)
    )
    assert csv_text(rows) == "name,kind,predicted_s,why\n[b]<i>,FWD,0.5,it is slow\n"
    assert json.loads(json_line(rows[0])) == rows[0]
