"""What reports say of a prediction: its headline and MFU, the costliest lines and tensors of sections, its roofs."""

import json
from dataclasses import replace
from typing import Any

import pytest

from sambasim.costs.cut import Level
from sambasim.costs.price import Bound
from sambasim.hardware.spec import load_device
from sambasim.ir.graph import SectionKind
from sambasim.report.analysis import (
    WHICH_FLOPS,
    Analysis,
    costliest_line,
    mfu,
    model_flops,
    published,
    range_text,
    reachable,
    seconds_of,
)
from sambasim.report.page import predicted_page
from sambasim.report.page.sections import roofline
from sambasim.report.simulation import simulation_json
from sambasim.simulation.prediction import likely
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_seconds
from tests.report.test_page import DIGEST, Page
from tests.simulation.test_advice import BATCH, CLASSES, HEAD_LINE, WIDTH, predicted, wide
from tests.simulation.test_laws import _convolutions, _perceptron


def test_the_host_is_named_with_what_it_fetches_and_the_line_to_change() -> None:
    prediction = predicted(wide())
    alone = prediction.alone
    share = alone.host_s / alone.predicted_s
    assert share > 0.5
    after = format_seconds(predicted(wide(False)).alone.predicted_s)
    assert Analysis(prediction).headline == (
        f"{share:.0%} of the step is the host: it fetches 39.1 MiB of wide__outputs__0 each step; return only the loss "
        f"(tests/simulation/test_advice.py:{HEAD_LINE}): {format_seconds(alone.predicted_s)} -> {after}"
    )


def test_sections_are_named_by_their_bound() -> None:
    short = Analysis(predicted(wide(False), batch_size=8)).headline
    assert "of the step is sections bound by their launch, at least 400.0 us each; batch 64 instead of 8: " in short
    many = Analysis(predicted(wide(False), batch_size=1 << 20))
    times_s = many.step.device_s_by_bound
    words = {Bound.COMPUTE: "compute", Bound.MEMORY: "DDR"}[max(times_s, key=times_s.__getitem__)]
    share = max(times_s.values()) / many.step.predicted_s
    assert many.headline.startswith(f"{share:.0%} of the step is sections bound by {words}; ")


def test_mfu_counts_products_of_forward_and_backward_over_the_whole_step() -> None:
    prediction = predicted(wide(), tiles=4)
    # two matrices in the forward and their gradients; the input needs none
    flops = 2 * BATCH * (WIDTH * WIDTH * 2 + WIDTH * CLASSES * 3)
    assert model_flops(prediction) == flops
    peak = load_device("sn30").peak_bf16_flops_per_s / 2
    assert mfu(prediction) == pytest.approx(flops / prediction.alone.predicted_s / peak)
    assert model_flops(predicted(wide(), batch_size=3 * BATCH)) == 3 * flops


def test_page_and_json_have_the_headline_and_the_same_figures() -> None:
    prediction = predicted(wide(), replicas=(1, 8), batch_size=16 * BATCH)
    found = Analysis(prediction)
    page = Page(predicted_page(prediction, DIGEST))
    words = "".join(page.words)
    assert found.headline in page.words
    (line,) = simulation_json(prediction, [SyncPath.RDU])
    record = json.loads(line)
    assert record["headline"] == found.headline
    assert record["predicted_mfu"] == mfu(prediction)
    span = likely(prediction)
    assert span is not None
    assert range_text(span.least_s, span.most_s) in page.words
    assert span.basis in page.words
    narrow = likely(predicted(_perceptron(1 << 20, 256), tiles=4))
    assert narrow is not None
    assert "twice the worst that was left out" in narrow.basis
    assert found.costliest_lines in page.words
    assert record["lines"][0]["line"] == next(iter(found.line_s))
    assert WHICH_FLOPS in words
    assert f"{mfu(prediction):.1%}" in page.words
    assert "unknown" in Page(predicted_page(predicted(wide(False), batch_size=8), DIGEST)).words, "bound by launches"


def test_a_range_names_its_unit_once() -> None:
    assert range_text(2.97, 3.876) == "2.97 to 3.88 s"
    assert range_text(0.9, 1.25) == "900.0 ms to 1.25 s"


def test_the_costliest_lines_add_up_to_the_passes() -> None:
    found = Analysis(predicted(wide(), level="o0"))
    with_line = sum(
        section.price.predicted_s for section, line in zip(found.step.sections, found.lines, strict=True) if line
    )
    assert sum(found.line_s.values()) == pytest.approx(with_line)
    assert found.costliest_lines.startswith("tests/simulation/test_advice.py:")


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


def figure(found: Analysis) -> dict[str, dict[str, Any]]:
    (drawn,) = roofline(found).figures.values()
    traces = drawn["data"]
    assert isinstance(traces, list)
    return {trace["name"]: trace for trace in traces}


@pytest.mark.parametrize("level", ["o0", "o3"])
@pytest.mark.parametrize("model", [wide, _perceptron, _convolutions])
def test_no_section_is_above_its_roof(model: Any, level: Level) -> None:
    found = Analysis(predicted(model(), level=level))
    traces = figure(found)
    roof = reachable(found.prediction)
    assert traces.pop("published")["y"][1] == published(found.prediction).flops_per_s
    assert traces.pop("reachable")["y"][1] == pytest.approx(roof.flops_per_s)
    numbers = [number for trace in traces.values() for number in trace["customdata"]]
    with_products = [f.numbers[0] for f in found.folds if found.step.sections[f.numbers[0]].load.product_flops]
    assert sorted(numbers) == sorted(with_products)
    for trace in traces.values():
        for number, x, y in zip(trace["customdata"], trace["x"], trace["y"], strict=True):
            section = found.step.sections[number]
            assert x * section.load.traffic_bytes == pytest.approx(section.load.product_flops)
            assert y <= roof.at(x) * (1 + 1e-9)


def test_the_roofs_are_those_of_the_tiles_in_use() -> None:
    device = load_device("sn30")
    half, whole = (predicted(wide(), tiles=tiles) for tiles in (4, None))
    assert published(whole).flops_per_s == device.peak_bf16_flops_per_s == 2 * published(half).flops_per_s
    assert published(half).bytes_per_s == device.ddr_bandwidth_bytes_per_s / 2
    hbm = published(predicted(wide(), tiles=None, arch="sn40"))
    assert hbm.bytes_per_s == load_device("sn40").hbm_bandwidth_bytes_per_s
    (line,) = simulation_json(half, [SyncPath.RDU])
    record = json.loads(line)
    assert record["roofs"]["reachable"]["flops_per_s"] == reachable(half).flops_per_s
    assert reachable(half).flops_per_s < published(half).flops_per_s


def test_a_larger_point_takes_more_time() -> None:
    found = Analysis(predicted(wide(), level="o0", batch_size=16 * BATCH))
    for trace in list(figure(found).values())[2:]:
        times_s = [found.step.sections[number].price.predicted_s for number in trace["customdata"]]
        assert times_s == sorted(times_s, reverse=True)
        assert trace["marker"]["size"] == sorted(trace["marker"]["size"], reverse=True)
