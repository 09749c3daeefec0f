"""The schema of `pef.json`: frozen models that refuse unknown keys, one for each dataclass of `ir`.

Where order means something (symbols, values, regions) there is an array, because canonical JSON sorts the keys of
objects. Nodes and arguments are not models: a model for each of some ten thousand arguments would cost more time than
everything else in reading GPT-2's manifest. They are arrays and tagged strings, spelled by `encode` and checked by
`decode`.
"""

from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from sambasim.ir.graph import SectionKind
from sambasim.ir.types import SymbolKind
from sambasim.ir.verify import LARGEST_BYTES

FORMAT_NAME: Final = "sambasim-pef"
FORMAT_VERSION = (1, 0)
HIGHEST_RANK = 64
"""Dimensions of a tensor; torch's own limit. It keeps hostile shapes from having astronomical products."""

Size = Annotated[int, Field(ge=0, le=LARGEST_BYTES)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Version = Annotated[str, Field(pattern=r"^[0-9]{1,9}\.[0-9]{1,9}$")]
Shape = Annotated[tuple[Size, ...], Field(max_length=HIGHEST_RANK)]
FILE_NAME = r"^[^/\\\x00-\x1f\x7f-\x9f\u2028\u2029]+$"
LONGEST_FILE_NAME = 255
FileName = Annotated[str, Field(pattern=FILE_NAME, max_length=LONGEST_FILE_NAME)]
TypedName = tuple[str, str, Shape]
"""A value: name, dtype, shape."""
SourceRow = tuple[str, int, str]
"""A source line: file, line, code."""
RegionRow = tuple[str, Size]
"""A region of a group: name, device address."""


class StrictModel(BaseModel):
    """Part of a file: frozen, and without keys that it does not know."""

    # Strict: a JSON string is no number and a number no string, however alike they look.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class SymbolModel(StrictModel):
    """ir.Symbol, its type as dtype and shape."""

    name: str
    kind: SymbolKind
    dtype: str
    shape: Shape
    offset: Size | None
    torch_names: tuple[str, ...]
    exclusive_bound: int | None


class SectionModel(StrictModel):
    """ir.Section; its index is its place in the array."""

    kind: SectionKind
    name: str
    start: Size
    stop: Size


class GraphModel(StrictModel):
    """ir.Graph. `nodes` are rows as `encode.encode_node` writes them; their sources are indexes into `sources`."""

    name: str
    inputs: tuple[str, ...]
    nodes: tuple[object, ...]
    outputs: tuple[tuple[str, str], ...]
    values: tuple[TypedName, ...]
    sections: tuple[SectionModel, ...]
    sources: tuple[SourceRow, ...]


class MemberModel(StrictModel):
    """ir.Member."""

    parameter: str
    gradient: str
    start: Size
    numel: Size


class GroupModel(StrictModel):
    """ir.ParameterGroup."""

    name: str
    dtype: str
    numel: Size
    members: tuple[MemberModel, ...]
    optimizer: Size
    regions: tuple[RegionRow, ...]


class OptimizerModel(StrictModel):
    """ir.Optimizer."""

    name: str
    kind: Literal["sgd", "adam", "adamw"]
    states: tuple[str, ...]


class RuntimeArgumentModel(StrictModel):
    """ir.RuntimeArgument; the default is a number, or a tagged string where JSON has no such number."""

    name: str
    default: bool | int | float | Literal["=inf", "=-inf", "=nan"]
    meaning: str


class GradientGroupModel(StrictModel):
    """ir.GradientGroup."""

    group: str
    symbol: str


class DataParallelModel(StrictModel):
    """ir.DataParallel."""

    gradient_groups: tuple[GradientGroupModel, ...]
    reduce_buffer: str


class AxisModel(StrictModel):
    """ir.Axis."""

    name: str
    size: Size
    at_run_time: bool


class ProgramModel(StrictModel):
    """ir.Program."""

    name: FileName
    batch_size: Size
    symbols: tuple[SymbolModel, ...]
    training: GraphModel | None
    evaluation: GraphModel
    single: GraphModel | None
    loss: str | None
    per_sample_loss: bool
    optimizers: tuple[OptimizerModel, ...]
    groups: tuple[GroupModel, ...]
    runtime_arguments: tuple[RuntimeArgumentModel, ...]
    data_parallel: DataParallelModel | None
    device_bytes: Size
    mesh: tuple[AxisModel, ...]


class WeightsModel(StrictModel):
    """What the manifest says of the member `weights.safetensors`, its safetensors header included."""

    sha256: Sha256
    size_bytes: Size


class Manifest(StrictModel):
    """All of `pef.json`. `format`, `version` and `writer` keep their place and meaning in every version to come."""

    format: Literal["sambasim-pef"]
    version: Version
    writer: str
    digest: Sha256
    program: ProgramModel
    weights: WeightsModel
    data_source: dict[str, JsonValue]
    compile_options: dict[str, JsonValue]
    training_defaults: dict[str, JsonValue]
    metadata: dict[str, str]
