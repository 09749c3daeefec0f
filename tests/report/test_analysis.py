"""What reports say of a prediction: headline and MFU, costliest lines and tensors of sections, equal sections, roofs,
and the drawing of sections: each in one box, every tensor between boxes in a curve."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sambasim.costs.cut import Level
from sambasim.costs.price import Bound
from sambasim.hardware.spec import load_device
from sambasim.ir.graph import SectionKind
from sambasim.report.analysis import Analysis, Run, costliest_line, runs_of, seconds_of
from sambasim.report.page import predicted_page
from sambasim.report.page.sections import roofline, section_graph
from sambasim.report.simulation import simulation_json, simulation_report
from sambasim.report.tables import Tables
from sambasim.simulation.prediction import Likely, Prediction, likely, predict
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_seconds
from tests.pef.samples import inference_program
from tests.report.test_page import DIGEST, Page
from tests.simulation.test_advice import BATCH, CLASSES, HEAD_LINE, WIDTH, predicted, wide
from tests.simulation.test_laws import compiled, convolutions, perceptron
from tests.support.compiled import Made

FILE = "tests/simulation/test_advice.py"


def in_json(prediction: Prediction) -> Any:
    (line,) = simulation_json(prediction, [SyncPath.RDU])
    return json.loads(line)


def test_the_headline_names_the_host_or_the_bound_of_sections() -> None:
    alone = predicted(wide()).alone
    share = alone.host_s / alone.predicted_s
    assert share > 0.5
    after = format_seconds(predicted(wide(False)).alone.predicted_s)
    assert Analysis(predicted(wide())).headline == (
        f"{share:.0%} of the step is the host: it fetches 39.1 MiB of made__outputs__0 each step; return only the loss "
        f"({FILE}:{HEAD_LINE}): {format_seconds(alone.predicted_s)} -> {after}"
    )
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
    shown = (span.range, span.basis, f"{analysis.mfu:.1%}")
    assert {analysis.headline, analysis.costliest_lines, *shown} <= set(page.words)
    assert "FLOP of products a step, without recomputation" in "".join(page.words)
    assert [row[15] for row in page.data["sections"]] == analysis.lines
    narrow = likely(predicted(perceptron(1 << 20, 256), tiles=4))
    assert narrow is not None
    assert "twice the worst that was left out" in narrow.basis
    assert "unknown" in Page(predicted_page(predicted(wide(False), batch_size=8), DIGEST)).words, "bound by launches"
    ranges = [Likely(*ends, "").range for ends in ((2.97, 3.876), (0.9, 1.25))]
    assert ranges == ["2.97 to 3.88 s", "900.0 ms to 1.25 s"]


def test_the_costliest_line_is_of_the_largest_product_and_tensors_go_from_writer_to_readers() -> None:
    found = Analysis(predicted(wide(), level="o0"))
    sections, passes_s = found.step.sections, 0.0
    flops = [section.load.product_flops for section in sections]
    assert found.lines[flops.index(max(flops))] == f"{FILE}:{HEAD_LINE}"
    for section, line in zip(sections, found.lines, strict=True):
        works = section.kind is not SectionKind.OPT and section.load.traffic_bytes > 0
        assert line.startswith(f"{FILE}:") == works, section.name
        passes_s += section.price.predicted_s if line else 0.0
    assert sum(found.line_s.values()) == pytest.approx(passes_s)
    assert found.costliest_lines.startswith(f"{FILE}:")
    tensors, read_bytes = found.stages.tensors, [0] * len(sections)
    for (writer, reader), size_bytes in tensors.items():
        assert writer < reader
        assert size_bytes > 0
        read_bytes[reader] += size_bytes
    assert all(size <= section.load.read_bytes for size, section in zip(read_bytes, sections, strict=True))
    assert max(tensors.values()) == 2 * BATCH * CLASSES, "the logits, in bf16"


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


@given(st.text("abc", max_size=40))
def test_runs_are_the_sections_in_order(keys: str) -> None:
    runs = runs_of(keys)
    assert "".join(keys[run.start : run.start + run.period] * run.count for run in runs) == keys
    assert [run.start for run in runs[1:]] == [run.stop for run in runs[:-1]]
    assert all(run.period == 1 for run in runs if run.count == 1)


@pytest.mark.parametrize(
    ("keys", "runs"),
    [
        ("xababaz", [(0, 1, 1), (1, 2, 2), (5, 1, 1), (6, 1, 1)]),
        ("aabaabaab", [(0, 3, 3)]),
        ("aaaa", [(0, 1, 4)]),
        ("e" + "pqr" * 36 + "h" + "rqp" * 36, [(0, 1, 1), (1, 3, 36), (109, 1, 1), (110, 3, 36)]),
    ],
)
def test_the_longest_run_with_the_shortest_period(keys: str, runs: list[tuple[int, int, int]]) -> None:
    assert runs_of(keys) == [Run(*run) for run in runs]


@pytest.mark.parametrize("level", ["o0", "o1"])
def test_layers_are_folded_the_table_ranks_by_the_sum_and_json_keeps_every_section(
    level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    deep = predicted(perceptron(depth=12), level=level, tiles=1)
    prediction = predict(deep.program, deep.device, 1, level, deep.cluster, (1,), micro_steps=3)
    found, record = Analysis(prediction), in_json(prediction)
    sections, folds = found.step.sections, found.folds
    assert sorted(number for fold in folds for number in fold) == list(range(len(sections)))
    assert len(folds) < len(sections) == len(record["sections"])
    for fold in folds:
        assert len({(sections[number].kind, sections[number].price, sections[number].load) for number in fold}) == 1
    sums: dict[int, float] = {}
    for section in record["sections"]:
        runs = 3 if section["kind"] in (SectionKind.FWD, SectionKind.BCKWD) else 1
        sums[section["fold"]] = sums.get(section["fold"], 0.0) + runs * section["predicted_s"]
    assert sum(sums.values()) == pytest.approx(found.step.device_s)
    assert [found.fold_s(fold) for fold in folds] == pytest.approx([sums[number] for number in range(len(sums))])
    largest = max(folds, key=found.fold_s)
    count, costliest = len(largest), sections[largest[0]]
    printed = str(Tables(simulation_report([prediction], [SyncPath.RDU], 3), None))
    cells = printed.partition("slowest sections")[2].splitlines()[4].split()
    assert cells[: 1 + (count > 1)] == [str(largest[0]), f"x{count}"][: 1 + (count > 1)]
    total, each = (format_seconds(time_s) for time_s in (found.fold_s(largest), found.fold_s(largest) / 3 / count))
    assert found.runs_in_step(largest) == 3 * count
    assert f"{total} {3 * count} {each}" in " ".join(cells)
    assert f" {costliest.unit_share:.0%} {costliest.chip_share:.0%} " in " ".join(cells)
    shares = [record["sections"][largest[0]][name] for name in ("unit_share", "chip_share")]
    assert shares == [costliest.unit_share, costliest.chip_share]
    slower = [replace(each, price=replace(each.price, fill_s=number)) for number, each in enumerate(sections)]
    other = Analysis(prediction)
    other.step = replace(found.step, model=tuple(slower), update=())
    assert len(other.folds) == len(slower), "of other times"


@pytest.mark.parametrize("level", ["o0", "o3"])
@pytest.mark.parametrize("model", [wide, perceptron, convolutions])
def test_no_section_is_above_its_roof_and_a_larger_point_takes_more_time(model: Any, level: Level) -> None:
    found = Analysis(predicted(model(), level=level, batch_size=16 * BATCH if model is wide else None))
    (drawn,), sections, roof = roofline(found).figures.values(), found.step.sections, found.reachable
    data: Any = drawn["data"]
    traces = {trace["name"]: trace for trace in data}
    assert traces.pop("published")["y"][1] == found.published.flops_per_s
    assert traces.pop("reachable")["y"][1] == pytest.approx(roof.flops_per_s)
    numbers = [number for trace in traces.values() for number in trace["customdata"]]
    assert sorted(numbers) == sorted(fold[0] for fold in found.folds if sections[fold[0]].load.product_flops)
    for trace in traces.values():
        for number, x, y in zip(trace["customdata"], trace["x"], trace["y"], strict=True):
            assert x * sections[number].load.traffic_bytes == pytest.approx(sections[number].load.product_flops)
            assert y <= roof.at(x) * (1 + 1e-9)
        times_s = [found.fold_s(next(fold for fold in found.folds if number in fold)) for number in trace["customdata"]]
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


def drawing_of(found: Analysis) -> tuple[list[list[int]], list[list[int]], list[str]]:
    """The first and last section of each box, the first and last box of each curve, and all words."""
    page = Page(section_graph(found).body)

    def numbers(first: str, last: str) -> list[list[int]]:
        return [[int(a[first] or 0), int(a[last] or 0)] for _, a in page.elements if first in a]

    return numbers("data-first", "data-last"), numbers("data-from", "data-to"), page.words


def test_a_skip_connection_passes_other_sections_and_too_many_boxes_are_not_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(net: Any, x: Any) -> Any:
        kept = net.first(x)
        return (net.third(torch.tanh(net.second(kept))) + kept).square().mean()

    sizes = {"first": 3, "second": 1, "third": 1}
    layers = {name: nn.Conv2d(8, 8, size, padding=size // 2) for name, size in sizes.items()}
    found = Analysis(predicted(compiled(lambda: Made(forward, **layers), 16, 8, 64, 64), level="o0"))
    boxes, curves, words = drawing_of(found)
    names = [section.name for section in found.step.sections]
    pairs = [(number, box) for box, (first, last) in enumerate(boxes) for number in range(first, last + 1)]
    assert sorted(number for number, _ in pairs) == list(range(len(names)))
    box_of = dict(pairs)
    start = box_of[names.index("made__first__conv2d")]
    readers = [boxes[stop][0] for begin, stop in curves if begin == start]
    assert any(names[number].startswith("made__add") for number in readers)
    assert any("1.0 MiB from 0 made__first__conv2d to " in word for word in words), "bf16[16, 8, 64, 64]"
    assert "1.0 MiB" in words
    monkeypatch.setattr("sambasim.report.page.sections.MOST_BOXES", 3)
    body = section_graph(found).body
    assert "too large to draw" in body
    assert "<svg" not in body


def test_repeated_layers_are_one_box_and_a_forward_alone_is_one_column() -> None:
    assert drawing_of(Analysis(predicted(inference_program())))[0] == [[0, 0]]
    found = Analysis(predicted(perceptron(depth=12), level="o0", tiles=1))
    boxes, curves, words = drawing_of(found)
    assert len(boxes) < len(found.step.sections) / 3
    assert any("\u00d7" in word for word in words)
    assert all(begin != stop for begin, stop in curves)
    pairs = {(tensor["from"], tensor["to"]): tensor["bytes"] for tensor in in_json(found.prediction)["tensors"]}
    assert pairs == found.stages.tensors
