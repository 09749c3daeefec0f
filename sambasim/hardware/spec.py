"""Devices, links and clusters as TOML tables: what `--arch` and `--cluster` name. Every figure has an entry in
`sources`: a publication, a derivation, or "estimate"."""

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import ValidationError

from sambasim.errors import (
    HIGHEST_RATE,
    LARGEST_BYTES,
    LARGEST_COUNT,
    LARGEST_TOML_BYTES,
    LONGEST_WAIT_S,
    MOST_RDUS,
    MOST_TILES,
    MOST_UNITS,
    OptionError,
    PefError,
    failing_with,
    is_too_deep,
)
from sambasim.files import fault_text, read_text

ALIASES = {"sn20": "sn30", "sn40": "sn40l"}  # `--arch` values of SambaFlow, and the device file that each means

Bytes: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST_BYTES)]
Rate: TypeAlias = Annotated[float, Field(ge=1, le=HIGHEST_RATE)]
Units: TypeAlias = Annotated[int, Field(ge=1, le=MOST_UNITS)]
Links: TypeAlias = Annotated[int, Field(ge=1, le=MOST_RDUS)]


class Spec(BaseModel):
    """A table of figures. `sources` has an entry for every figure that is set."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
    choices: ClassVar[frozenset[str]] = frozenset()  # fields that are no figures, and need no source

    name: str = Field(min_length=1)
    sources: Mapping[str, str]

    @model_validator(mode="after")
    def _each_figure_has_a_source(self) -> "Spec":
        figures = self.model_fields_set - {"name", "sources"} - self.choices
        if missing := sorted(figures - self.sources.keys()):
            raise ValueError(f"no source is given for {', '.join(missing)}; 'estimate' is one")
        if unknown := sorted(self.sources.keys() - type(self).model_fields.keys()):
            raise ValueError(f"sources has {', '.join(unknown)}, which is not a figure")
        return self


class DeviceSpec(Spec):
    """One RDU. Units are in the names. `cluster` is the default cluster of the device."""

    tiles: int | None = Field(default=None, ge=1, le=MOST_TILES)  # not published for every device
    pcus: Units
    pmus: Units
    sram_bytes: Bytes
    pcu_bf16_flops_per_s: Rate  # the peak of one
    ddr_capacity_bytes: Bytes
    ddr_bandwidth_bytes_per_s: Rate
    hbm_capacity_bytes: Bytes | None = None
    hbm_bandwidth_bytes_per_s: Rate | None = None
    cluster: str = "sn30-8"
    choices: ClassVar[frozenset[str]] = frozenset({"cluster"})

    @property
    def peak_bf16_flops_per_s(self) -> float:
        return self.pcus * self.pcu_bf16_flops_per_s

    def part(self, tiles: int | None) -> str:
        """`4 of 8 tiles of SN30`; None is all of it."""
        return self.name if tiles is None else f"{tiles} of {self.tiles} tiles of {self.name}"

    @model_validator(mode="after")
    def _hbm_has_both_figures(self) -> "DeviceSpec":
        if (self.hbm_capacity_bytes is None) != (self.hbm_bandwidth_bytes_per_s is None):
            raise ValueError("HBM needs both hbm_capacity_bytes and hbm_bandwidth_bytes_per_s")
        return self


class LinkSpec(Spec):
    """A full-duplex link: bytes per second in each direction, and the latency of an empty message. Where processors
    compute, each byte that arrives, and one that leaves meanwhile, takes `processor_s_per_byte` of their time."""

    bandwidth_bytes_per_s: Rate
    latency_s: float = Field(ge=0, le=LONGEST_WAIT_S)
    processor_s_per_byte: float = Field(default=0.0, ge=0, le=LONGEST_WAIT_S)


class ClusterSpec(Spec):
    """Equal nodes; `nodes` is None for no limit.

    peer_link: between two RDUs of a node; an RDU uses its `peer_links_per_rdu` links together
    host_link: between an RDU and its host, `host_links_per_rdu` of them
    host_memory_bytes_per_s: of one node, shared by everything that its RDUs copy and its host adds
    network_link: between nodes; the RDUs of a node share `network_links_per_node` of them
    """

    nodes: int | None = Field(default=None, ge=1, le=LARGEST_COUNT)
    rdus_per_node: int = Field(ge=1, le=MOST_RDUS)
    peer_link: LinkSpec
    peer_links_per_rdu: Links
    host_link: LinkSpec
    host_links_per_rdu: Links
    host_memory_bytes_per_s: Rate
    network_link: LinkSpec
    network_links_per_node: Links
    choices: ClassVar[frozenset[str]] = frozenset({"nodes"})


@cache
def load_device(name: str) -> DeviceSpec:
    """The shipped device `name`, or the device in the TOML file `name`. Raises OptionError if there is none."""
    return _load(DeviceSpec, "device", "--arch", ALIASES.get(name, name))


@cache
def load_cluster(name: str) -> ClusterSpec:
    """The shipped cluster `name`, or the cluster in the TOML file `name`. Raises OptionError if there is none."""
    return _load(ClusterSpec, "cluster", "--cluster", name)


def arch_of(compile_options: Mapping[str, object]) -> str:
    """The name of the device that a PEF with these options was compiled for, by default sn30. Raises PefError if that
    does not ship with sambasim: a PEF must not make us open a file."""
    name = compile_options.get("arch", "sn30")
    if not isinstance(name, str) or ALIASES.get(name, name) not in device_names():
        what = f"the PEF was compiled for the device {str(name)[:40]!r}, which does not ship with sambasim"
        raise PefError(what, where="compile_options.arch", remedy=f"compile it for one of {', '.join(device_names())}")
    return name


def shipped_text(name: str) -> str:
    return (files("sambasim.hardware") / name).read_text(encoding="utf-8")


def _shipped(folder: str) -> tuple[str, ...]:
    entries = (files("sambasim.hardware") / folder).iterdir()
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in entries if entry.name.endswith(".toml")))


device_names, cluster_names = partial(_shipped, "devices"), partial(_shipped, "clusters")


def _with_link(key: str, value: object, where: str) -> object:
    """The value of a field, where the name of a link stands for its table."""
    if not key.endswith("_link") or not isinstance(value, str):
        return value
    links = tomllib.loads(shipped_text("links.toml"))
    if value not in links:
        remedy = f"name one of {', '.join(links)}, or write a table [{key}]"
        raise OptionError(f"{key} of {where} is {value!r}, which is not a known link", remedy=remedy)
    return {"name": value, **links[value]}


_Table = TypeVar("_Table", bound=Spec)


def _load(model: type[_Table], kind: str, flag: str, name: str) -> _Table:
    """Raises OptionError, which names each figure that is missing, unknown or out of range."""
    if name.endswith(".toml") or "/" in name:
        with failing_with(OptionError, f"{flag} {name} cannot be read", "name a TOML file"):
            text, where = read_text(Path(name), LARGEST_TOML_BYTES), name
    elif name in (shipped := _shipped(f"{kind}s")):
        text, where = shipped_text(f"{kind}s/{name}.toml"), f"the {kind} file {name}.toml"
    else:
        found = get_close_matches(name.lower(), (*shipped, *(ALIASES if kind == "device" else ())), n=1)
        remedy = f"{flag} {found[0]}, or a TOML file" if found else f"one of them, or a TOML file: {flag} FILE.toml"
        what = f"there is no {kind} called {name!r}: there are {', '.join(shipped)}"
        raise OptionError(what, remedy=remedy)
    try:
        tables = tomllib.loads(text)
        if is_too_deep(tables):
            raise RecursionError
        return model.model_validate({key: _with_link(key, value, where) for key, value in tables.items()})
    except ValidationError as error:
        wrong = "; ".join(map(_problem, error.errors()))
        raise OptionError(f"{where} is not a valid {kind}: {wrong}", remedy="correct the file") from error
    except ValueError as error:  # also an integer of thousands of digits
        raise OptionError(f"{where} is not valid TOML: {error}", remedy="correct the file") from error
    except RecursionError:
        raise OptionError(f"{where} is nested too deeply", remedy="correct the file") from None


def _problem(fault: Any) -> str:
    if (kind := fault["type"]) in ("missing", "extra_forbidden"):
        return f"{'.'.join(map(str, fault['loc']))} is {'missing' if kind == 'missing' else 'unknown'}"
    return fault_text(fault)
