"""What tiles of a device give."""

import pytest

from sambasim.errors import OptionError
from sambasim.hardware.budget import budget_of, load_calibration
from sambasim.hardware.spec import device_names, load_device

CALIBRATION = load_calibration()


def test_half_the_tiles_have_half_of_everything() -> None:
    device = load_device("sn30")
    whole, half = budget_of(device, CALIBRATION), budget_of(device, CALIBRATION, 4)
    assert (whole.units, half.units) == (1280, 640)
    assert half.chip_bytes == whole.chip_bytes // 2
    assert half.memory_bytes_per_s == whole.memory_bytes_per_s / 2
    assert half.capacity_bytes == whole.capacity_bytes // 2
    assert half.stages == 12, "as in the published section counts"


@pytest.mark.parametrize("tiles", [0, 9])
def test_tiles_that_a_device_does_not_have_are_refused(tiles: int) -> None:
    with pytest.raises(OptionError, match=f"--num-tiles {tiles} of an SN30, which has 8"):
        budget_of(load_device("sn30"), CALIBRATION, tiles)


def test_a_device_of_unknown_tiles_is_taken_whole() -> None:
    device = load_device("sn40")
    whole = budget_of(device, CALIBRATION)
    assert whole.memory == "HBM"
    assert whole.capacity_bytes == device.ddr_capacity_bytes + (1 << 36)
    assert whole.behind is not None
    assert whole.behind.fast_bytes == 1 << 36
    assert whole.behind.bytes_per_s < whole.memory_bytes_per_s
    with pytest.raises(OptionError, match="the number of tiles of an SN40L is not published"):
        budget_of(device, CALIBRATION, 4)


@pytest.mark.parametrize("name", device_names())
def test_every_device_has_a_budget(name: str) -> None:
    budget = budget_of(load_device(name), CALIBRATION)
    assert budget.stages >= 1
    assert budget.unit_flops_per_s * budget.units < load_device(name).peak_bf16_flops_per_s
