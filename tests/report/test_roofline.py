"""Sections below the roofs of the device."""

import json
from typing import Any

import pytest

from sambasim.costs.cut import Level
from sambasim.hardware.spec import load_device
from sambasim.report.analysis import Analysis, published, reachable
from sambasim.report.page.sections import roofline
from sambasim.report.simulation import simulation_json
from sambasim.simulation.sync import SyncPath
from tests.simulation.test_advice import BATCH, predicted, wide
from tests.simulation.test_laws import _convolutions, _perceptron


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
