"""What reports say of a prediction: headline and MFU, costliest lines and tensors of sections, roofs, and the
drawing of sections: each in one box, every tensor between boxes in a curve."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sambasim.compiler.capture.step import Example
from sambasim.compiler.front import compile_shapes
from sambasim.costs.cut import Level
from sambasim.costs.price import Bound
from sambasim.hardware.spec import load_device
from sambasim.ir.graph import SectionKind
from sambasim.ir.program import Program
from sambasim.options.compile import CompileOptions
from sambasim.options.training import OptimizerOptions, TrainingOptions
from sambasim.report.analysis import WHICH_FLOPS, Analysis, costliest_line, range_text, seconds_of
from sambasim.report.page import predicted_page
from sambasim.report.page.sections import roofline, section_graph
from sambasim.report.simulation import simulation_json
from sambasim.simulation.prediction import Prediction, likely
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_seconds
from tests.pef.samples import inference_program
from tests.report.test_page import DIGEST, Page
from tests.report.test_page import predicted as sample_prediction
from tests.simulation.test_advice import BATCH, CLASSES, HEAD_LINE, WIDTH, predicted, wide
from tests.simulation.test_laws import _convolutions, _perceptron

FILE = "tests/simulation/test_advice.py"


def in_json(prediction: Prediction) -> Any:
    (line,) = simulation_json(prediction, [SyncPath.RDU])
    return json.loads(line)


def test_the_host_is_named_with_what_it_fetches_and_the_line_to_change() -> None:
    alone = predicted(wide()).alone
    share = alone.host_s / alone.predicted_s
    assert share > 0.5
    after = format_seconds(predicted(wide(False)).alone.predicted_s)
    assert Analysis(predicted(wide())).headline == (
        f"{share:.0%} of the step is the host: it fetches 39.1 MiB of wide__outputs__0 each step; return only the loss "
        f"({FILE}:{HEAD_LINE}): {format_seconds(alone.predicted_s)} -> {after}"
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
    analysis = Analysis(predicted(wide(), tiles=4))
    # two matrices in the forward and their gradients; the input needs none
    flops = 2 * BATCH * (WIDTH * WIDTH * 2 + WIDTH * CLASSES * 3)
    assert analysis.model_flops == flops
    peak = load_device("sn30").peak_bf16_flops_per_s / 2
    assert analysis.mfu == pytest.approx(flops / analysis.step.predicted_s / peak)
    assert Analysis(predicted(wide(), batch_size=3 * BATCH)).model_flops == 3 * flops


def test_page_and_json_have_the_headline_and_the_same_figures() -> None:
    prediction = predicted(wide(), replicas=(1, 8), batch_size=16 * BATCH)
    analysis, page, record = Analysis(prediction), Page(predicted_page(prediction, DIGEST)), in_json(prediction)
    assert (record["headline"], record["predicted_mfu"]) == (analysis.headline, analysis.mfu)
    assert record["lines"][0]["line"] == next(iter(analysis.line_s))
    span = likely(prediction)
    assert span is not None
    shown = (range_text(span.least_s, span.most_s), span.basis, f"{analysis.mfu:.1%}")
    assert {analysis.headline, analysis.costliest_lines, *shown} <= set(page.words)
    assert WHICH_FLOPS in "".join(page.words)
    sections = page.data["sections"]
    assert isinstance(sections, list)
    assert [row[15] for row in sections] == analysis.lines
    narrow = likely(predicted(_perceptron(1 << 20, 256), tiles=4))
    assert narrow is not None
    assert "twice the worst that was left out" in narrow.basis
    assert "unknown" in Page(predicted_page(predicted(wide(False), batch_size=8), DIGEST)).words, "bound by launches"


def test_a_range_names_its_unit_once() -> None:
    assert range_text(2.97, 3.876) == "2.97 to 3.88 s"
    assert range_text(0.9, 1.25) == "900.0 ms to 1.25 s"


def test_the_costliest_line_is_that_of_the_largest_product() -> None:
    found = Analysis(predicted(wide(), level="o0"))
    flops = [section.load.product_flops for section in found.step.sections]
    assert found.lines[flops.index(max(flops))] == f"{FILE}:{HEAD_LINE}"
    passes_s = 0.0
    for section, line in zip(found.step.sections, found.lines, strict=True):
        works = section.kind is not SectionKind.OPT and section.load.traffic_bytes > 0
        assert line.startswith(f"{FILE}:") == works, section.name
        passes_s += section.price.predicted_s if line else 0.0
    assert sum(found.line_s.values()) == pytest.approx(passes_s)
    assert found.costliest_lines.startswith(f"{FILE}:")


def test_where_memory_is_slow_it_is_the_line_that_moves_most() -> None:
    found = Analysis(predicted(wide()))
    graph, flops = found.prediction.graph, [section.load.product_flops for section in found.step.sections]
    rows, section = max(zip(found.stages.rows, found.step.sections, strict=True), key=lambda p: p[1].load.product_flops)
    assert section.load.product_flops == max(flops)
    for slow, expected in (("compute_s", HEAD_LINE), ("memory_s", HEAD_LINE + 1)):
        line = costliest_line(graph, rows, replace(section, price=replace(section.price, **{slow: 9.0})))
        assert line is not None
        assert line.line == expected, "the backward of the loss reads what the loss wrote"
    for rows, section in zip(found.stages.rows, found.step.sections, strict=True):
        assert not rows or sum(seconds_of(rows, graph, section)) == pytest.approx(section.price.predicted_s)


def test_tensors_go_from_the_section_that_writes_them_to_those_that_read_them() -> None:
    found = Analysis(predicted(wide(), level="o0"))
    sections, tensors = found.step.sections, found.stages.tensors
    read_bytes = [0] * len(sections)
    for (writer, reader), size_bytes in tensors.items():
        assert writer < reader
        assert size_bytes > 0
        read_bytes[reader] += size_bytes
    assert all(size <= section.load.read_bytes for size, section in zip(read_bytes, sections, strict=True))
    assert max(tensors.values()) == 2 * BATCH * CLASSES, "the logits, in bf16"


def traces_of(found: Analysis) -> dict[str, dict[str, Any]]:
    (drawn,) = roofline(found).figures.values()
    traces = drawn["data"]
    assert isinstance(traces, list)
    return {trace["name"]: trace for trace in traces}


@pytest.mark.parametrize("level", ["o0", "o3"])
@pytest.mark.parametrize("model", [wide, _perceptron, _convolutions])
def test_no_section_is_above_its_roof_and_a_larger_point_takes_more_time(model: Any, level: Level) -> None:
    found = Analysis(predicted(model(), level=level, batch_size=16 * BATCH if model is wide else None))
    traces, sections, roof = traces_of(found), found.step.sections, found.reachable
    assert traces.pop("published")["y"][1] == found.published.flops_per_s
    assert traces.pop("reachable")["y"][1] == pytest.approx(roof.flops_per_s)
    numbers = [number for trace in traces.values() for number in trace["customdata"]]
    assert sorted(numbers) == sorted(fold[0] for fold in found.folds if sections[fold[0]].load.product_flops)
    for trace in traces.values():
        for number, x, y in zip(trace["customdata"], trace["x"], trace["y"], strict=True):
            assert x * sections[number].load.traffic_bytes == pytest.approx(sections[number].load.product_flops)
            assert y <= roof.at(x) * (1 + 1e-9)
        times_s = [found.fold_s(found.folds[found.fold_of[number]]) for number in trace["customdata"]]
        assert times_s == sorted(times_s, reverse=True)
        assert trace["marker"]["size"] == sorted(trace["marker"]["size"], reverse=True)


def test_the_roofs_are_those_of_the_tiles_in_use() -> None:
    device = load_device("sn30")
    half, whole = (Analysis(predicted(wide(), tiles=tiles)) for tiles in (4, None))
    assert whole.published.flops_per_s == device.peak_bf16_flops_per_s == 2 * half.published.flops_per_s
    assert half.published.bytes_per_s == device.ddr_bandwidth_bytes_per_s / 2
    hbm = Analysis(predicted(wide(), tiles=None, arch="sn40")).published
    assert hbm.bytes_per_s == load_device("sn40").hbm_bandwidth_bytes_per_s
    roof_flops_per_s = in_json(half.prediction)["roofs"]["reachable"]["flops_per_s"]
    assert roof_flops_per_s == half.reachable.flops_per_s < half.published.flops_per_s


class Skip(nn.Module):
    """Its first result is read again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x)
        result: Tensor = (self.third(torch.tanh(self.second(kept))) + kept).square().mean()
        return result


def skip() -> Program:
    optimizer, training = OptimizerOptions(name="sgd"), TrainingOptions(batch_size=16)
    options = CompileOptions(optimizer=optimizer, training=training, pef_name="skip")
    return compile_shapes(Skip, lambda _: Example({"x": torch.zeros(16, 8, 64, 64)}, False), options)


def drawing_of(found: Analysis) -> tuple[list[list[int]], list[list[int]], list[str]]:
    """The first and last section of each box, the first and last box of each curve, and all words."""
    page = Page(section_graph(found).body)

    def numbers(first: str, last: str) -> list[list[int]]:
        return [[int(a[first] or 0), int(a[last] or 0)] for _, a in page.elements if first in a]

    return numbers("data-first", "data-last"), numbers("data-from", "data-to"), page.words


def test_a_skip_connection_passes_other_sections() -> None:
    found = Analysis(predicted(skip(), level="o0"))
    boxes, curves, words = drawing_of(found)
    names = [section.name for section in found.step.sections]
    pairs = [(number, box) for box, (first, last) in enumerate(boxes) for number in range(first, last + 1)]
    assert sorted(number for number, _ in pairs) == list(range(len(names)))
    box_of = dict(pairs)
    start = box_of[names.index("skip__first__conv2d")]
    readers = [boxes[stop][0] for begin, stop in curves if begin == start]
    assert any(names[number].startswith("skip__add") for number in readers)
    assert any("1.0 MiB from 0 skip__first__conv2d to " in word for word in words), "bf16[16, 8, 64, 64]"
    assert "1.0 MiB" in words


def test_repeated_layers_are_one_box() -> None:
    found = Analysis(predicted(_perceptron(width=64, depth=30), level="o0"))
    boxes, curves, words = drawing_of(found)
    assert len(boxes) < len(found.step.sections) / 3
    assert any("\u00d7" in word for word in words)
    assert all(begin != stop for begin, stop in curves)
    pairs = {(tensor["from"], tensor["to"]): tensor["bytes"] for tensor in in_json(found.prediction)["tensors"]}
    assert pairs == found.stages.tensors


def test_a_forward_alone_is_one_column_and_too_many_boxes_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawing_of(Analysis(sample_prediction(inference_program())))[0] == [[0, 0]]
    monkeypatch.setattr("sambasim.report.page.sections.MOST_BOXES", 3)
    body = section_graph(Analysis(predicted(skip(), level="o0"))).body
    assert "too large to draw" in body
    assert "<svg" not in body
