"""Tables: their formats, and how they are shown on terminals of any width."""

import json

import pytest

from sambasim.report.page import ui
from sambasim.report.tables import Table, Tables, csv_text, json_line, table, text_of, text_table


def printed(shown: Table, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
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
    lines = printed(steps, width, monkeypatch)
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
    row = {
        "line": line,
        "name": "a_name_that_is_long_enough_to_be_folded",
        "total_s": 1.0,
        "runs": 36,
        "each_s": 0.0278,
        "traffic_bytes": 123 << 20,
    }
    slowest = table("slowest", [row], "line, name", "total_s, runs, each_s, traffic_bytes", whole=("line",))
    lines = printed(slowest, columns, monkeypatch)
    assert [head in lines[2] for head in ("total", "runs", "each", "traffic")] == [
        place < numbers for place in range(4)
    ]
    assert (line in "\n".join(lines)) == whole
    pieces = [text.split()[0] for text in lines[4:] if text[:2].strip()]
    assert "".join(pieces).startswith(line), "folded, and not clipped"


def test_the_unit_at_the_end_of_a_name_is_the_format() -> None:
    fields = {"step_s": 0.0123, "size_bytes": 1536, "host_share": 0.125, "samples_per_s": 12345.0, "count": 7}
    assert [text_of(*field) for field in fields.items()] == ["12.3 ms", "1.5 KiB", "12.5%", "12.3 k", "7"]
    assert [text_of("stages", (0, 2)), text_of("sync", None), text_of("step_s", "as asked")] == ["0, 2", "", "as asked"]


def test_terminal_page_csv_and_json_show_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"name": "[b]<i>", "kind": "FWD", "predicted_s": 0.5, "why": "it is slow"}]
    shown = table("sections", rows, "name:section, kind", "predicted_s", "why")
    lines = printed(shown, 80, monkeypatch)
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
