"""The few numbers that turn a device's published figures into times."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt


class Parameter(BaseModel):
    """One of them, with what it means and where it is from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: PositiveFloat
    meaning: str = Field(min_length=1)
    source: str = Field(min_length=1)


class Share(Parameter):
    """A part of a whole."""

    value: PositiveFloat = Field(le=1)


class Count(BaseModel):
    """A whole number."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    value: PositiveInt
    meaning: str = Field(min_length=1)
    source: str = Field(min_length=1)


class Fit(BaseModel):
    """How far off the rows are that the numbers were calibrated on: parts of the published values, without signs. Held
    against `sambasim validate` by a test."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str
    arch: str
    rows: str
    mean_error: PositiveFloat
    worst_error: PositiveFloat
    worst_host_error: PositiveFloat


class Calibration(BaseModel):
    """All of them, and how well they fit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ddr_efficiency: Share
    hbm_efficiency: Share
    unit_efficiency: Share
    launch_s: Parameter
    host_s_per_section: Parameter
    host_bytes_per_s: Parameter
    units_per_stage: Count
    buffer_share: Share
    tile_rows: Count
    least_tiles: Count
    fit: Fit

    def parameters(self) -> Mapping[str, Parameter | Count]:
        """All but how well they fit, by name."""
        named = ((name, getattr(self, name)) for name in type(self).model_fields)
        return {name: value for name, value in named if isinstance(value, Parameter | Count)}


@cache
def load_calibration() -> Calibration:
    """The one that ships with sambasim."""
    text = (files("sambasim.hardware") / "calibration.toml").read_text(encoding="utf-8")
    return Calibration.model_validate(tomllib.loads(text))
