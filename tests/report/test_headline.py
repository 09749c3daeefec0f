"""The headline names what takes most of the step, and MFU counts the FLOPs of the model."""

import json

import pytest

from sambasim.costs.price import Bound
from sambasim.hardware.spec import load_device
from sambasim.report.analysis import WHICH_FLOPS, Analysis, mfu, model_flops, range_text
from sambasim.report.page import predicted_page
from sambasim.report.simulation import simulation_json
from sambasim.simulation.prediction import likely
from sambasim.simulation.sync import SyncPath
from sambasim.units import format_seconds
from tests.report.test_page import DIGEST, Page
from tests.simulation.test_advice import BATCH, CLASSES, HEAD_LINE, WIDTH, predicted, wide
from tests.simulation.test_laws import _perceptron


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
