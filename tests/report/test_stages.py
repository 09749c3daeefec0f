"""The operators of sections: the costliest line of each, and the tensors between them."""

from dataclasses import replace

import pytest

from sambasim.ir.graph import SectionKind
from sambasim.report.findings import Findings
from sambasim.report.output import add_row, plain_table
from sambasim.report.page import predicted_page
from sambasim.report.shown import Tables
from sambasim.report.stages import costliest_line
from tests.report.test_page import Page
from tests.simulation.test_advice import BATCH, CLASSES, HEAD_LINE, predicted, wide

FILE = "tests/simulation/test_advice.py"


def test_the_costliest_line_is_that_of_the_largest_product() -> None:
    found = Findings(predicted(wide(), level="o0"))
    flops = [section.load.product_flops for section in found.step.sections]
    assert found.lines[flops.index(max(flops))] == f"{FILE}:{HEAD_LINE}"
    for section, line in zip(found.step.sections, found.lines, strict=True):
        works = section.kind is not SectionKind.OPT and section.load.traffic_bytes > 0
        assert line.startswith(f"{FILE}:") == works, section.name


def test_where_memory_is_slow_it_is_the_line_that_moves_most() -> None:
    found = Findings(predicted(wide()))
    flops = [section.load.product_flops for section in found.step.sections]
    rows, budget = found.stages.rows[flops.index(max(flops))], found.step.budget
    slow_memory = costliest_line(found.prediction.graph, rows, replace(budget, memory_bytes_per_s=1.0))
    slow_units = costliest_line(found.prediction.graph, rows, replace(budget, unit_flops_per_s=1.0))
    assert slow_units is not None
    assert slow_units.line == HEAD_LINE
    assert slow_memory is not None
    assert slow_memory.line == HEAD_LINE + 1, "the backward of the loss reads what the loss wrote"


def test_tensors_go_from_the_section_that_writes_them_to_those_that_read_them() -> None:
    found = Findings(predicted(wide(), level="o0"))
    sections, tensors = found.step.sections, found.stages.tensors
    assert all(writer < reader for writer, reader in tensors)
    read_bytes = [0] * len(sections)
    for (_, reader), size_bytes in tensors.items():
        assert size_bytes > 0
        read_bytes[reader] += size_bytes
    assert all(size <= one.load.read_bytes for size, one in zip(read_bytes, sections, strict=True))
    assert max(tensors.values()) == 2 * BATCH * CLASSES, "the logits, in bf16"


def test_the_page_has_the_line_of_each_section() -> None:
    prediction = predicted(wide())
    data = Page(predicted_page(prediction, None)).data
    sections = data["sections"]
    assert isinstance(sections, list)
    assert [row[15] for row in sections] == Findings(prediction).lines


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_column_that_must_stay_whole_is_not_broken(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table = plain_table("slowest", ["line", "name"], ["predicted", "traffic"])
    table.columns[0].no_wrap = True
    add_row(table, "a/module.py:1234", "a_name_that_is_long_enough_to_be_folded", "1.00 s", "123.0 MiB")
    monkeypatch.setenv("COLUMNS", str(columns))
    printed = str(Tables([table], None))
    assert "a/module.py:1234" in printed
    assert max(map(len, printed.splitlines())) <= columns
    assert ("traffic" in printed.splitlines()[2]) == (columns > 40)
