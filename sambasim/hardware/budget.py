"""What a replica may use of a device: some of its tiles, with the memory beside the chip."""

from dataclasses import dataclass

from sambasim.errors import OptionError
from sambasim.hardware.calibration import Calibration
from sambasim.hardware.spec import DeviceSpec


@dataclass(frozen=True, slots=True)
class Budget:
    """Units, bytes and rates of some tiles. `unit_flops_per_s` is that of one compute unit, as far as it is reached,
    `memory_bytes_per_s` likewise that of the memory beside the chip, which is called `memory`."""

    units: int
    stages: int
    chip_bytes: int
    unit_flops_per_s: float
    memory: str
    memory_bytes_per_s: float
    launch_s: float
    tile_rows: int


def budget_of(device: DeviceSpec, calibration: Calibration, tiles: int | None = None) -> Budget:
    """Of `tiles` tiles of `device`; None for all of them.

    A replica has all of the device's memory bandwidth to itself: the published rows are of one that runs alone. Raises
    OptionError for more tiles than there are, and for a device of which nobody has published how many it has.
    """
    share = 1.0 if tiles is None else _share(device, tiles)
    units = int(device.pcus * share)
    has_hbm = device.hbm_bandwidth_bytes_per_s is not None
    bandwidth = device.hbm_bandwidth_bytes_per_s or device.ddr_bandwidth_bytes_per_s
    efficiency = calibration.hbm_efficiency if has_hbm else calibration.ddr_efficiency
    return Budget(
        units=units,
        stages=max(1, units // calibration.units_per_stage.value),
        chip_bytes=int(device.sram_bytes * share * calibration.buffer_share.value),
        unit_flops_per_s=device.peak_bf16_flops_per_s / device.pcus * calibration.unit_efficiency.value,
        memory="HBM" if has_hbm else "DDR",
        memory_bytes_per_s=bandwidth * efficiency.value,
        launch_s=calibration.launch_s.value,
        tile_rows=calibration.tile_rows.value,
    )


def _share(device: DeviceSpec, tiles: int) -> float:
    if device.tiles is None:
        raise OptionError(
            f"nobody has published how many tiles an {device.name} has, so it cannot be shared by tiles",
            remedy="leave out --num-tiles",
        )
    if not 1 <= tiles <= device.tiles:
        raise OptionError(
            f"--num-tiles {tiles} of an {device.name}, which has {device.tiles}",
            remedy=f"give 1 to {device.tiles}, or another --arch",
        )
    return tiles / device.tiles
