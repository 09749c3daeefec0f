"""A device as data: what `--arch` names.

Every figure in `devices/*.toml` stands beside its source; a figure that nobody published says `estimate` or how it was
derived, and whoever prints it prints that too. Users write their own in the same form.
"""

from collections.abc import Mapping
from functools import cache

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from sambasim.errors import OptionError, PefError
from sambasim.hardware.tables import checked, is_file, shipped, shipped_text, user_text

DEFAULT_ARCH = "sn30"
"""The device of a PEF that does not say for which it was compiled."""

ALIASES = {"sn40": "sn40l"}
"""Spellings of `--arch` that SambaFlow takes for a device that we file under another name."""


class Spec(BaseModel):
    """Figures, and where each is from: `sources` has an entry for every one that is set."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str = Field(min_length=1)
    sources: Mapping[str, str]

    @model_validator(mode="after")
    def _each_figure_has_a_source(self) -> "Spec":
        figures = self.model_fields_set - {"name", "sources"} - self.without_source()
        bare = sorted(figures - self.sources.keys())
        if bare:
            raise ValueError(f"no source is given for {', '.join(bare)}; 'estimate' is one")
        unknown = sorted(self.sources.keys() - type(self).model_fields.keys())
        if unknown:
            raise ValueError(f"sources has {', '.join(unknown)}, which is no figure")
        return self

    @classmethod
    def without_source(cls) -> frozenset[str]:
        """What is a choice and no figure."""
        return frozenset()


class DeviceSpec(Spec):
    """One RDU. Units are in the names; `cluster` is the one that it is usually built into."""

    tiles: PositiveInt | None = None  # not published for every device
    pcus: PositiveInt
    pmus: PositiveInt
    sram_bytes: PositiveInt
    peak_bf16_flops_per_s: PositiveFloat
    ddr_capacity_bytes: PositiveInt
    ddr_bandwidth_bytes_per_s: PositiveFloat
    hbm_capacity_bytes: PositiveInt | None = None
    hbm_bandwidth_bytes_per_s: PositiveFloat | None = None
    cluster: str = "sn30-8"

    @classmethod
    def without_source(cls) -> frozenset[str]:
        return frozenset({"cluster"})

    @model_validator(mode="after")
    def _hbm_has_both_figures(self) -> "DeviceSpec":
        if (self.hbm_capacity_bytes is None) != (self.hbm_bandwidth_bytes_per_s is None):
            raise ValueError("HBM needs both hbm_capacity_bytes and hbm_bandwidth_bytes_per_s")
        return self


def device_names() -> tuple[str, ...]:
    """The devices that ship with sambasim, in order."""
    return shipped("devices")


def device_of(compiled: Mapping[str, object]) -> DeviceSpec:
    """The device that a PEF with the options `compiled` was compiled for. Raises PefError as `arch_of` does."""
    return load_device(arch_of(compiled))


def arch_of(compiled: Mapping[str, object]) -> str:
    """The name of that device, which is one that ships with sambasim.

    No file is opened because a PEF names it. Raises PefError for any other.
    """
    name = compiled.get("arch", DEFAULT_ARCH)
    if not isinstance(name, str) or ALIASES.get(name, name) not in device_names():
        what = f"the PEF was compiled for the device {str(name)[:40]!r}, which does not ship with sambasim"
        raise PefError(what, where="compile_options.arch", remedy=f"compile it for one of {', '.join(device_names())}")
    return name


@cache
def load_device(name: str) -> DeviceSpec:
    """The device called `name`, or the one in the file of that name. Raises OptionError if there is none."""
    if is_file(name):
        return checked(DeviceSpec, user_text("--arch", name), name)
    name = ALIASES.get(name, name)
    if name not in device_names():
        raise OptionError(
            f"there is no device called {name!r}",
            remedy=f"--arch takes one of {', '.join(device_names())}, or a TOML file",
        )
    return checked(DeviceSpec, shipped_text(f"devices/{name}.toml"), f"the device file {name}.toml")
