"""A device as data: what `--arch` names.

Every figure in `devices/*.toml` stands beside its source; a figure that nobody published says `estimate` or how it was
derived, and whoever prints it prints that too.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from sambasim.errors import OptionError

ALIASES = {"sn40": "sn40l"}
"""Spellings of `--arch` that SambaFlow takes for a device that we file under another name."""


class DeviceSpec(BaseModel):
    """One RDU. Units are in the names; `sources` has one entry for each figure."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    tiles: PositiveInt | None = None  # not published for every device
    pcus: PositiveInt
    pmus: PositiveInt
    sram_bytes: PositiveInt
    peak_bf16_flops_per_s: PositiveFloat
    ddr_capacity_bytes: PositiveInt
    ddr_bandwidth_bytes_per_s: PositiveFloat
    hbm_capacity_bytes: PositiveInt | None = None
    hbm_bandwidth_bytes_per_s: PositiveFloat | None = None
    sources: Mapping[str, str]


@cache
def device_names() -> tuple[str, ...]:
    """The devices that ship with sambasim, in order."""
    folder = files("sambasim.hardware") / "devices"
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml")))


@cache
def load_device(name: str) -> DeviceSpec:
    """The device called `name`. Raises OptionError if there is none."""
    name = ALIASES.get(name, name)
    if name not in device_names():
        raise OptionError(
            f"there is no device called {name!r}", remedy=f"--arch takes one of {', '.join(device_names())}"
        )
    text = (files("sambasim.hardware") / "devices" / f"{name}.toml").read_text(encoding="utf-8")
    try:
        return DeviceSpec.model_validate(tomllib.loads(text))
    except ValidationError as error:
        raise OptionError(f"the device file {name}.toml is wrong: {error}") from error
