"""The published rows, as data."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt


class Row(BaseModel):
    """One measurement of somebody else.

    figure: `device_s`, seconds of a training step on the device; `samples_per_s` or `tokens_per_s`, of all `replicas`
    host_s: seconds of host time in the same step, where that was published
    sections: how many there were, where that was published
    samples_tokens: tokens of one sample
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    model: Literal["gpt2", "unet"]
    args: Mapping[str, bool | int | float]
    batch_size: PositiveInt
    device: Literal["sn10", "sn30", "sn40"]
    tiles: PositiveInt | None = None
    level: Literal["o0", "o1", "o3"]
    figure: Literal["device_s", "samples_per_s", "tokens_per_s"]
    value: PositiveFloat
    host_s: PositiveFloat | None = None
    sections: PositiveInt | None = None
    replicas: PositiveInt = 1
    samples_tokens: PositiveInt = 1
    source: str

    def figure_of(self, device_s: float, step_s: float) -> float:
        """What a step comes to, in the row's figure: seconds on the device, and of host, device and sync together."""
        match self.figure:
            case "device_s":
                return device_s
            case "samples_per_s":
                return self.replicas * self.batch_size / step_s
            case _:
                return self.replicas * self.batch_size * self.samples_tokens / step_s


@cache
def published_rows() -> tuple[Row, ...]:
    """All that ship with sambasim."""
    text = (files("sambasim.published") / "rows.toml").read_text(encoding="utf-8")
    return tuple(Row.model_validate(row) for row in tomllib.loads(text)["rows"])
