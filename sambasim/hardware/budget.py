"""What a replica may use of a device: some of its tiles, with the memory beside the chip."""

from dataclasses import dataclass

from sambasim.errors import OptionError
from sambasim.hardware.calibration import Calibration
from sambasim.hardware.spec import DeviceSpec


@dataclass(frozen=True, slots=True)
class Behind:
    """DDR behind HBM: the HBM has room for `fast_bytes`, and the rest is read at `bytes_per_s`."""

    fast_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Budget:
    """Units, bytes and rates of some tiles, which are called `where`.

    unit_flops_per_s: of one compute unit, as far as it is reached
    memory_bytes_per_s: of the memory beside the chip, called `memory`, as far as it is reached
    capacity_bytes: all of that memory, what is `behind` it included
    """

    where: str
    units: int
    stages: int
    chip_bytes: int
    unit_flops_per_s: float
    memory: str
    memory_bytes_per_s: float
    capacity_bytes: int
    behind: Behind | None
    launch_s: float
    tile_rows: int
    least_tiles: int


def budget_of(device: DeviceSpec, calibration: Calibration, tiles: int | None = None) -> Budget:
    """Of `tiles` tiles of `device`; None for all of them. Tiles have equal parts of everything, of memory too, so that
    replicas which share a device do not slow each other.

    Raises OptionError for more tiles than there are, and for a device of which nobody has published how many it has.
    """
    share = 1.0 if tiles is None else _share(device, tiles)
    units = int(device.pcus * share)
    ddr_bytes_per_s = device.ddr_bandwidth_bytes_per_s * share * calibration.ddr_efficiency.value
    hbm_bytes = int((device.hbm_capacity_bytes or 0) * share)
    hbm_bytes_per_s = (device.hbm_bandwidth_bytes_per_s or 0) * share * calibration.hbm_efficiency.value
    return Budget(
        where=device.name if tiles is None else f"{tiles} of {device.tiles} tiles of {device.name}",
        units=units,
        stages=max(1, units // calibration.units_per_stage.value),
        chip_bytes=int(device.sram_bytes * share * calibration.buffer_share.value),
        unit_flops_per_s=device.peak_bf16_flops_per_s / device.pcus * calibration.unit_efficiency.value,
        memory="HBM" if hbm_bytes else "DDR",
        memory_bytes_per_s=hbm_bytes_per_s or ddr_bytes_per_s,
        capacity_bytes=int(device.ddr_capacity_bytes * share) + hbm_bytes,
        behind=Behind(hbm_bytes, ddr_bytes_per_s) if hbm_bytes else None,
        launch_s=calibration.launch_s.value,
        tile_rows=calibration.tile_rows.value,
        least_tiles=calibration.least_tiles.value,
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
