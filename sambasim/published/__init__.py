"""Published measurements of steps, which `sambasim validate` compares with predictions, and in `models` the models that
they were made with."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt


class Row(BaseModel):
    """One published measurement, of `figure`: `device_s` is the device time of a training step, `samples_per_s` and
    `tokens_per_s` are of all replicas. `host_s` is of the same step; `units_share` is the share of the compute units
    that the section with the most uses; `samples_tokens` are the tokens of one sample."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)

    name: str
    model: Literal["gpt2", "unet"]
    args: Mapping[str, bool | int | float]
    batch_size: PositiveInt
    device: Literal["sn10", "sn30", "sn40"]
    tiles: PositiveInt | None = None
    level: Literal["o0", "o1", "o3"]
    mapped_by: Literal["compiler", "vendor"] = "compiler"
    figure: Literal["device_s", "samples_per_s", "tokens_per_s"]
    value: PositiveFloat
    host_s: PositiveFloat | None = None
    sections: PositiveInt | None = None
    units_share: PositiveFloat | None = None
    replicas: PositiveInt = 1
    samples_tokens: PositiveInt = 1
    source: str

    def figure_of(self, device_s: float, step_s: float) -> float:
        """A step in the unit of `figure`. `step_s` is the sum of host, device and exposed sync."""
        of_each = self.samples_tokens if self.figure == "tokens_per_s" else 1
        return device_s if self.figure == "device_s" else self.replicas * self.batch_size * of_each / step_s


@cache
def published_rows() -> tuple[Row, ...]:
    """All rows in rows.toml."""
    text = (files("sambasim.published") / "rows.toml").read_text(encoding="utf-8")
    return tuple(Row.model_validate(row) for row in tomllib.loads(text)["rows"])
