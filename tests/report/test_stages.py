"""The operators of sections: the costliest line of each, and the tensors between them."""

from dataclasses import replace

import pytest

from sambasim.ir.graph import SectionKind
from sambasim.report.analysis import Analysis, costliest_line, seconds_of
from sambasim.report.page import predicted_page
from tests.report.test_page import Page
from tests.simulation.test_advice import BATCH, CLASSES, HEAD_LINE, predicted, wide

FILE = "tests/simulation/test_advice.py"


def test_the_costliest_line_is_that_of_the_largest_product() -> None:
    found = Analysis(predicted(wide(), level="o0"))
    flops = [section.load.product_flops for section in found.step.sections]
    assert found.lines[flops.index(max(flops))] == f"{FILE}:{HEAD_LINE}"
    for section, line in zip(found.step.sections, found.lines, strict=True):
        works = section.kind is not SectionKind.OPT and section.load.traffic_bytes > 0
        assert line.startswith(f"{FILE}:") == works, section.name


def test_where_memory_is_slow_it_is_the_line_that_moves_most() -> None:
    found = Analysis(predicted(wide()))
    flops = [section.load.product_flops for section in found.step.sections]
    number = flops.index(max(flops))
    rows, section = found.stages.rows[number], found.step.sections[number]
    slow_memory = costliest_line(
        found.prediction.graph, rows, replace(section, price=replace(section.price, memory_s=9.0))
    )
    slow_units = costliest_line(
        found.prediction.graph, rows, replace(section, price=replace(section.price, compute_s=9.0))
    )
    assert slow_units is not None
    assert slow_units.line == HEAD_LINE
    assert slow_memory is not None
    assert slow_memory.line == HEAD_LINE + 1, "the backward of the loss reads what the loss wrote"
    for rows, section in zip(found.stages.rows, found.step.sections, strict=True):
        assert not rows or sum(seconds_of(rows, found.prediction.graph, section)) == pytest.approx(
            section.price.predicted_s
        )


def test_tensors_go_from_the_section_that_writes_them_to_those_that_read_them() -> None:
    found = Analysis(predicted(wide(), level="o0"))
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
    assert [row[15] for row in sections] == Analysis(prediction).lines
