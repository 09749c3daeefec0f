"""What one replica may use of a device, and the calibration that turns published figures into reachable rates."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from sambasim.errors import OptionError
from sambasim.hardware.spec import DeviceSpec, shipped_text


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Parameter(_Table):
    value: PositiveFloat
    meaning: str = Field(min_length=1)
    source: str = Field(min_length=1)


class Count(Parameter):
    value: PositiveInt


class Fit(_Table):
    """Errors of the predictions on the `rows` used for calibration, as unsigned fractions of the published values, and
    on rows of a width that was left out. A test compares the first with `sambasim validate`."""

    device: str
    arch: str
    rows: str
    mean_error: PositiveFloat
    worst_error: PositiveFloat
    worst_host_error: PositiveFloat
    left_out_mean_error: PositiveFloat
    left_out_worst_error: PositiveFloat


class Calibration(_Table):
    """All calibrated numbers, and how well they fit: the content of `calibration.toml`."""

    ddr_efficiency: Parameter
    hbm_efficiency: Parameter
    unit_efficiency: Parameter
    pipeline_share: Parameter
    launch_s: Parameter
    load_s: Parameter
    host_s_per_section: Parameter
    host_bytes_per_s: Parameter
    units_per_stage: Count
    buffer_share: Parameter
    tile_rows: Count
    least_tiles: Count
    fit: Fit

    def parameters(self) -> Mapping[str, Parameter]:
        named = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: value for name, value in named if isinstance(value, Parameter)}


@cache
def load_calibration() -> Calibration:
    return Calibration.model_validate(tomllib.loads(shipped_text("calibration.toml")))


@dataclass(frozen=True, slots=True)
class Behind:
    """DDR of a device with HBM: what exceeds the `fast_bytes` of HBM is read at `bytes_per_s`."""

    fast_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Budget:
    """What one replica may use. `where` is for messages; `memory` is what sections stream from, HBM or DDR, at the
    reachable rate; `capacity_bytes` includes the DDR `behind` an HBM."""

    where: str
    units: int
    stages: int
    chip_bytes: int
    unit_flops_per_s: float
    pipeline_share: float
    memory: str
    memory_bytes_per_s: float
    capacity_bytes: int
    behind: Behind | None
    launch_s: float
    load_s: float
    tile_rows: int
    least_tiles: int

    @property
    def in_pipelines(self) -> "Budget":
        """The budget of sections of several operators, where units wait for the slowest stage."""
        return replace(self, unit_flops_per_s=self.unit_flops_per_s * self.pipeline_share, pipeline_share=1.0)

    @property
    def off_chip(self) -> str:
        """The name of all off-chip memory."""
        return "HBM and DDR" if self.behind else self.memory


MappedBy: TypeAlias = Literal["compiler", "vendor"]


def budget_of(
    device: DeviceSpec, calibration: Calibration, tiles: int | None = None, mapped_by: MappedBy = "compiler"
) -> Budget:
    """The budget of `tiles` tiles of `device`; None for all. Tiles have equal shares of everything. `mapped_by`: who
    placed operators on units; the vendor, by hand, keeps all of them busy. Raises OptionError for more tiles than there
    are, and where their number is not published."""
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
        pipeline_share=calibration.pipeline_share.value if mapped_by == "compiler" else 1.0,
        memory="HBM" if hbm_bytes else "DDR",
        memory_bytes_per_s=hbm_bytes_per_s or ddr_bytes_per_s,
        capacity_bytes=int(device.ddr_capacity_bytes * share) + hbm_bytes,
        behind=Behind(hbm_bytes, ddr_bytes_per_s) if hbm_bytes else None,
        launch_s=calibration.launch_s.value,
        load_s=calibration.load_s.value,
        tile_rows=calibration.tile_rows.value,
        least_tiles=calibration.least_tiles.value,
    )


def _share(device: DeviceSpec, tiles: int) -> float:
    if device.tiles is None:
        raise OptionError(
            f"the number of tiles of an {device.name} is not published, so it cannot be divided",
            remedy="leave out --num-tiles",
        )
    if not 1 <= tiles <= device.tiles:
        raise OptionError(
            f"--num-tiles {tiles} of an {device.name}, which has {device.tiles}",
            remedy=f"give 1 to {device.tiles}, or another --arch",
        )
    return tiles / device.tiles
