"""What one replica may use of a device, and the calibration that turns published figures into reachable rates; and the
memory of the machine that sambasim runs on."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from sambasim.errors import OptionError
from sambasim.hardware.spec import DeviceSpec, shipped_text
from sambasim.units import KIB


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Parameter(_Table):
    value: PositiveFloat
    meaning: str = Field(min_length=1)
    source: str = Field(min_length=1)


class Count(Parameter):
    value: PositiveInt


class Errors(_Table):
    mean_error: PositiveFloat
    worst_error: PositiveFloat


class Fit(Errors):
    """Errors of the predictions on the `rows` used for calibration, as unsigned fractions of the published values, and
    by level, of rows of a width that was left out. A test compares the first with `sambasim validate`."""

    device: str
    arch: str
    rows: str
    worst_host_error: PositiveFloat
    left_out: Mapping[str, Errors]

    @property
    def left_out_mean(self) -> float:
        return mean(one.mean_error for one in self.left_out.values())

    @property
    def left_out_worst(self) -> float:
        return max(one.worst_error for one in self.left_out.values())


class Calibration(_Table):
    """All calibrated numbers, and how well they fit: the content of `calibration.toml`."""

    ddr_efficiency: Parameter
    hbm_efficiency: Parameter
    unit_efficiency: Parameter
    convolution_efficiency: Parameter
    launch_s: Parameter
    load_s: Parameter
    host_s_per_section: Parameter
    host_bytes_per_s: Parameter
    columns_per_unit: Count
    placed_share: Parameter
    tile_rows: Count
    spread: Parameter
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
    """What one replica may use. `where` is for messages. Operators are placed on `placeable_units` of all `units`:
    `by_hand` on any number of them, else on one for every `columns_per_unit` of their results. `memory` is what
    sections stream from, HBM or DDR, at the reachable rate; `capacity_bytes` includes the DDR `behind` an HBM.
    `start_s` is host time to start a section, `host_bytes_per_s` the rate of inputs and outputs, `spread` that of the
    times of replicas, as a share of a pass."""

    where: str
    units: int
    placeable_units: int
    columns_per_unit: int
    by_hand: bool
    chip_bytes: int
    unit_flops_per_s: float
    convolution_flops_per_s: float
    memory: str
    memory_bytes_per_s: float
    capacity_bytes: int
    behind: Behind | None
    launch_s: float
    load_s: float
    start_s: float
    host_bytes_per_s: float
    tile_rows: int
    spread: float

    @property
    def off_chip(self) -> str:
        """The name of all off-chip memory."""
        return "HBM and DDR" if self.behind else self.memory


Mapper: TypeAlias = Literal["compiler", "vendor"]


def whole_tiles(device: DeviceSpec, tiles: int) -> int:
    """All tiles of `device`, of which a replica has `tiles`. Raises OptionError for more than there are, and
    where their number is not published."""
    if device.tiles is None:
        what = f"the number of tiles of an {device.name} is not published, so it cannot be divided"
        raise OptionError(what, remedy="leave out --num-tiles")
    if not 1 <= tiles <= device.tiles:
        remedy = f"give 1 to {device.tiles}, or another --arch"
        raise OptionError(f"--num-tiles {tiles} of an {device.name}, which has {device.tiles}", remedy=remedy)
    return device.tiles


def budget_of(
    device: DeviceSpec, tiles: int | None = None, mapped_by: Mapper = "compiler", calibration: Calibration | None = None
) -> Budget:
    """The budget of `tiles` tiles of `device`; None for all. Tiles have equal shares of everything. `mapped_by`: who
    placed operators on units; the vendor, by hand, keeps all of them busy. `calibration`: by default the shipped one.
    Raises OptionError as `whole_tiles`."""
    calibration = calibration or load_calibration()
    share = 1.0 if tiles is None else tiles / whole_tiles(device, tiles)
    units = int(device.pcus * share)
    placed = 1.0 if mapped_by == "vendor" else calibration.placed_share.value
    ddr_bytes_per_s = device.ddr_bandwidth_bytes_per_s * share * calibration.ddr_efficiency.value
    hbm_bytes = int((device.hbm_capacity_bytes or 0) * share)
    hbm_bytes_per_s = (device.hbm_bandwidth_bytes_per_s or 0) * share * calibration.hbm_efficiency.value
    as_is = ("columns_per_unit", "launch_s", "load_s", "host_bytes_per_s", "tile_rows", "spread")
    as_calibrated: dict[str, Any] = {name: getattr(calibration, name).value for name in as_is}
    return Budget(
        where=device.part(tiles),
        units=units,
        placeable_units=max(1, int(units * placed)),
        by_hand=mapped_by == "vendor",
        chip_bytes=int(device.sram_bytes * share * placed),
        unit_flops_per_s=device.pcu_bf16_flops_per_s * calibration.unit_efficiency.value,
        convolution_flops_per_s=device.pcu_bf16_flops_per_s * calibration.convolution_efficiency.value,
        memory="HBM" if hbm_bytes else "DDR",
        memory_bytes_per_s=hbm_bytes_per_s or ddr_bytes_per_s,
        capacity_bytes=int(device.ddr_capacity_bytes * share) + hbm_bytes,
        behind=Behind(hbm_bytes, ddr_bytes_per_s) if hbm_bytes else None,
        start_s=calibration.host_s_per_section.value,
        **as_calibrated,
    )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of available memory, also of this process's control group, such as a container; None without /proc."""
    kib = _numbers(root / "proc" / "meminfo").get("MemAvailable:")
    return None if kib is None else min([kib * KIB, *_of_groups(root)])


def _of_groups(root: Path) -> Iterator[int]:
    """What is left to the group, and to those that it is in, by their limits; files that they may drop are free
    (source: cgroup-v2.rst of Linux)."""
    file, top = root / "proc" / "self" / "cgroup", root / "sys" / "fs" / "cgroup"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    own = top.joinpath(*(line.removeprefix("0::/") for line in lines if line.startswith("0::/")))
    for folder in (own, *own.parents):
        limit = folder / "memory.max"
        if limit.exists() and (most := limit.read_text(encoding="ascii").strip()) != "max":
            used = int((folder / "memory.current").read_text(encoding="ascii"))
            dropped = _numbers(folder / "memory.stat").get("inactive_file", 0)
            yield max(int(most) - used + dropped, 0)


def _numbers(file: Path) -> dict[str, int]:
    """The first number of each line of `file`, by its first word."""
    lines = [line.split() for line in file.read_text(encoding="ascii").splitlines()] if file.exists() else []
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
