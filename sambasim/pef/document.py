"""The content of a PEF, and the schema of `pef.json`: pydantic over the dataclasses of `ir`. true, 1 and 1.0 stay a
boolean, an integer and a float; NaN and infinities are written as Python's `json` writes them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import AliasPath, BaseModel, ConfigDict, Field, JsonValue, TypeAdapter
from pydantic_core import SchemaSerializer, SchemaValidator

from sambasim import __version__
from sambasim.errors import InternalError
from sambasim.ir.mesh import DATA_PARALLEL, Axis, Mesh, least_replicas, replica_mesh
from sambasim.ir.program import Program
from sambasim.ir.types import Count, Symbol
from sambasim.pef.archive import WEIGHTS
from sambasim.units import counted

FORMAT: Final = "sambasim-pef"
VERSION: Final = "3"
WRITER = f"sambasim {__version__}"
FIRST_GRAPH = "first_graph"
"""The metadata with the name of the first graph of a PEF of several."""

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@dataclass(frozen=True, slots=True)
class Rounded:
    """A tensor that differs from eager PyTorch by rounding: at most by `difference`, relative to its largest number.
    `source`: the line of the model that gives it, or ""."""

    name: str
    difference: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    source: str

    def __str__(self) -> str:
        return f"{self.name} by {self.difference:.1e}"


@dataclass(frozen=True, slots=True)
class Checked:
    """How a PEF was compared with the model that it was compiled from, in eager PyTorch `torch`: in so many `steps`,
    each on another batch than the one that was compiled, so many tensors were `compared`. All had equal bits but for
    those that are `rounded`; `exceptions` are the ones that differ most."""

    steps: Count
    compared: Count
    threads: Count
    torch: str
    rounded: Count = 0
    exceptions: tuple[Rounded, ...] = ()

    def __str__(self) -> str:
        bits = ", bit for bit"
        if self.exceptions:
            bits = f" but for rounding in {counted(self.rounded, 'tensor')}, most in {self.exceptions[0]}"
        how = f"({counted(self.threads, 'thread')}, torch {self.torch})"
        return f"{counted(self.steps, 'step')} equal to eager PyTorch{bits} {how}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A PEF that was made: its file, what is in it, what is to be told, the seconds of each phase, and the proof."""

    path: Path
    program: Program
    digest: str
    notices: tuple[str, ...]
    phases_s: Mapping[str, float]
    checked: Checked | None = None


@dataclass(frozen=True, slots=True)
class FurtherGraph:
    """A graph of a PEF beside its first: a program of its own. It has the weights of the graphs before it, by symbol,
    but for those in `own`, which differ."""

    program: Program
    metadata: Mapping[str, str]
    checked: Checked | None = None
    own: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PefDocument:
    """The content of a PEF, without the weights. `checked`: None if it was not compared with its model. `digest` is the
    SHA-256 of `pef.json`, and covers the weights through `weights_sha256`; the writer fills in both. `further`: the
    graphs beside that of `program`, by name, in a PEF of several."""

    program: Program
    data_source: Mapping[str, JsonValue] = field(default_factory=dict)
    compile_options: Mapping[str, JsonValue] = field(default_factory=dict)
    training_defaults: Mapping[str, JsonValue] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    checked: Checked | None = None
    digest: str = ""
    weights_sha256: str = ""
    further: Mapping[str, FurtherGraph] = field(default_factory=dict)

    @property
    def graphs(self) -> "Mapping[str, PefDocument]":
        """Each graph by its name, as a PEF of one graph."""
        first = replace(self, further={})
        documents = {self.metadata.get(FIRST_GRAPH, ""): first}
        for name, graph in self.further.items():
            documents[name] = replace(first, program=graph.program, metadata=graph.metadata, checked=graph.checked)
        return documents

    def stored_as(self, graph: str) -> Mapping[str, str]:
        """The names in the file of the weights of `graph`, by symbol."""
        program, own = self.program, tuple[str, ...]()
        if graph in self.further:
            program, own = self.further[graph].program, self.further[graph].own
        names = program.names_of(*WEIGHTS)
        return {name: f"{graph}/{name}" if name in own else name for name in names}

    @property
    def stored(self) -> Mapping[str, Symbol]:
        """All weights by their names in the file. Raises InternalError for one of which graphs have another type."""
        found: dict[str, Symbol] = {}
        for graph, document in self.graphs.items():
            for name, key in self.stored_as(graph).items():
                symbol = replace(document.program.symbols[name], name=key)
                if found.setdefault(key, symbol).whole != symbol.whole:
                    raise InternalError(f"{key} is {found[key].whole}, and {symbol.whole} in the graph {graph}")
        return found


class _Lenient(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


def _of_program(name: str) -> Any:
    return Field(validation_alias=AliasPath("program", name))


class PefHeader(_Lenient):
    """What decides whether a job can start: a part of `pef.json`, of which the rest is not looked at. `zero`: what
    replicas keep in slices only, see `ir/ranks.py`; `further`: the graphs beside the first, by name."""

    format: Literal["sambasim-pef"]
    version: Literal["3"]
    writer: str
    name: str = _of_program("name")
    batch_size: Count = _of_program("batch_size")
    axes: list[Axis] = _of_program("mesh")
    zero: Count = _of_program("zero")
    training: _Lenient | None = _of_program("training")
    data_source: dict[str, JsonValue]
    compile_options: dict[str, JsonValue]
    training_defaults: dict[str, JsonValue]
    metadata: dict[str, JsonValue]
    checked: Checked | None = None
    further: dict[str, _Lenient] = {}
    digest: str = ""

    @property
    def world_size(self) -> int:
        """The fewest replicas."""
        return least_replicas(self.axes)

    @property
    def replica(self) -> Mesh:
        """The mesh of one replica."""
        return replica_mesh(self.axes)

    @property
    def ranks_of_replica(self) -> int:
        return self.replica.world_size

    @property
    def data_parallel(self) -> bool:
        """Whether a run chooses how many replicas there are."""
        return any(axis.at_run_time for axis in self.axes)

    def mesh(self, ranks: int) -> Mesh:
        """The mesh of a job of `ranks` ranks, a multiple of those of a replica."""
        inner = {axis: size for axis, size in self.replica.sizes.items() if axis != DATA_PARALLEL}
        outer = ranks // prod(inner.values())
        return Mesh({DATA_PARALLEL: outer} | inner if self.data_parallel or outer > 1 else inner)


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of `pef.json`. `format`, `version` and `writer` keep their place and meaning in every version to come."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # which holds for the dataclasses inside too

    format: Literal["sambasim-pef"]
    version: Literal["3"]
    writer: str
    program: Program
    weights_sha256: Sha256
    data_source: dict[str, JsonValue]
    compile_options: dict[str, JsonValue]
    training_defaults: dict[str, JsonValue]
    metadata: dict[str, str]
    checked: Checked | None = None
    further: dict[str, FurtherGraph] = field(default_factory=dict)


_SHARED = tuple(field.name for field in fields(PefDocument) if field.name != "digest")


def manifest_of(document: PefDocument) -> Manifest:
    """Its keys are sorted: same content, same bytes. Raises TypeError or ValueError for what is not JSON."""
    parts: dict[str, Any] = {name: getattr(document, name) for name in _SHARED}
    for name in ("data_source", "compile_options", "training_defaults", "metadata"):
        parts[name] = json.loads(json.dumps(dict(parts[name]), sort_keys=True, allow_nan=False, ensure_ascii=False))
    parts["further"] = dict(document.further)
    return Manifest(FORMAT, VERSION, WRITER, **parts)


def manifest_json(document: PefDocument) -> bytes:
    """The bytes of `pef.json`. Raises TypeError, ValueError or PydanticSerializationError for what JSON cannot say."""
    return serializer().to_json(manifest_of(document), warnings="error", exclude=left_out(document))


def left_out(document: PefDocument) -> set[str]:
    """The keys that `pef.json` does not have."""
    return set() if document.further else {"further"}


def document_of(data: bytes) -> PefDocument:
    """The content that `data` spells, without its digest. Raises pydantic.ValidationError for the first fault."""
    manifest: Manifest = _validator().validate_json(data)
    return PefDocument(**{name: getattr(manifest, name) for name in _SHARED})


@cache
def _schema() -> Any:
    return TypeAdapter(Manifest).core_schema


@cache
def serializer() -> SchemaSerializer:
    return SchemaSerializer(_schema(), {"ser_json_inf_nan": "constants"})


@cache
def _validator() -> SchemaValidator:
    """It ends at the first bad item of a list: the errors of a million bad items would take gigabytes."""
    return SchemaValidator(_fail_fast(_schema()))


def _fail_fast(schema: Any) -> Any:
    if isinstance(schema, dict):
        schema = {key: _fail_fast(value) for key, value in schema.items()}
        if schema.get("type") in ("tuple", "list", "dict"):
            schema["fail_fast"] = True
    elif isinstance(schema, list):
        schema = [_fail_fast(item) for item in schema]
    return schema
