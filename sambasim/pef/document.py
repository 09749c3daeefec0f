"""The content of a PEF, and the schema of `pef.json`: pydantic over the dataclasses of `ir`. true, 1 and 1.0 stay a
boolean, an integer and a float; NaN and infinities are written as Python's `json` writes them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from annotated_types import Len
from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, WrapSerializer
from pydantic_core import SchemaSerializer, SchemaValidator

from sambasim import __version__
from sambasim.errors import InternalError
from sambasim.ir.program import Program
from sambasim.ir.types import Count, Symbol
from sambasim.pef.archive import WEIGHTS
from sambasim.units import counted

FORMAT: Final = "sambasim-pef"
VERSION: Final = "4"
WRITER: Final[str] = f"sambasim {__version__}"

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
    phases_s: Mapping[str, float] = field(default_factory=dict)
    checked: Checked | None = None


def _canonical(table: Mapping[str, object]) -> Any:
    """With its keys sorted: same content, same bytes. Raises TypeError or ValueError for what is not JSON."""
    return json.loads(json.dumps(dict(table), sort_keys=True, allow_nan=False, ensure_ascii=False))


_SORTED = WrapSerializer(lambda table, serialized: serialized(_canonical(table)))
Table = Annotated[Mapping[str, JsonValue], _SORTED]


@dataclass(frozen=True, slots=True)
class PefGraph:
    """A graph of a PEF. It has the weights of the graphs before it, by symbol, but for those in `own`, which differ.
    `checked`: None if it was not compared with its model."""

    program: Program
    metadata: Annotated[Mapping[str, str], _SORTED]
    checked: Checked | None = None
    own: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PefDocument:
    """The content of a PEF, without the weights: all of `pef.json`. `format`, `version` and `writer` keep their place
    and meaning in every version to come. `graphs`: by name; one alone has that of its program. `digest` is the SHA-256
    of `pef.json`, and covers the weights through `weights_sha256`; the writer fills in both."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # which holds for the dataclasses inside too

    format: Literal["sambasim-pef"]
    version: Literal["4"]
    writer: str
    weights_sha256: Sha256
    data_source: Table
    compile_options: Table
    training_defaults: Table
    graphs: Annotated[Mapping[str, PefGraph], Len(1)]
    digest: Annotated[str, Field(min_length=1, max_length=0, exclude=True)] = ""  # of no text in `pef.json`

    @property
    def first(self) -> PefGraph:
        return next(iter(self.graphs.values()))

    @property
    def program(self) -> Program:
        """That of the first graph."""
        return self.first.program

    @property
    def metadata(self) -> Mapping[str, str]:
        """That of the first graph."""
        return self.first.metadata

    @property
    def has_several(self) -> bool:
        return len(self.graphs) > 1

    def only(self, name: str | None = None, **changes: Any) -> "PefDocument":
        """A PEF of one graph alone, by default the first, with `changes` of it."""
        name = next(iter(self.graphs)) if name is None else name
        return replace(self, graphs={name: replace(self.graphs[name], **changes)})

    def stored_as(self, graph: str) -> Mapping[str, str]:
        """The names in the file of the weights of `graph`, by symbol."""
        own, names = self.graphs[graph].own, self.graphs[graph].program.names_of(*WEIGHTS)
        return {name: f"{graph}/{name}" if name in own else name for name in names}

    @property
    def stored(self) -> Mapping[str, Symbol]:
        """All weights by their names in the file. Raises InternalError for one of which graphs have another type."""
        found: dict[str, Symbol] = {}
        for graph, of in self.graphs.items():
            for name, key in self.stored_as(graph).items():
                symbol = of.program.symbols[name] if key == name else replace(of.program.symbols[name], name=key)
                if found.setdefault(key, symbol).whole != symbol.whole:
                    raise InternalError(f"{key} is {found[key].whole}, and {symbol.whole} in the graph {graph}")
        return found


def manifest_json(document: PefDocument) -> bytes:
    """The bytes of `pef.json`. Raises PydanticSerializationError for what JSON cannot say."""
    return serializer().to_json(document, warnings="error")


def parse(data: bytes) -> PefDocument:
    """The content that `data` spells, without its digest. Raises pydantic.ValidationError for the first fault."""
    document: PefDocument = _validator().validate_json(data)
    return document


@cache
def _schema() -> Any:
    return TypeAdapter(PefDocument).core_schema


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
