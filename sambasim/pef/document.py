"""What a PEF says, once it has been read: the program, and what belongs to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import JsonValue

from sambasim.ir.program import Program


@dataclass(frozen=True, slots=True)
class PefDocument:
    """The content of a PEF, without the weights.

    `data_source` is what `data` in the config said, `training_defaults` what a run does unless told otherwise; both,
    and `compile_options`, are JSON objects that this room does not look into. `digest` identifies the PEF: it covers
    all of the above and, through `weights_sha256`, the weights. The writer fills in both digests.
    """

    program: Program
    data_source: Mapping[str, JsonValue] = field(default_factory=dict)
    compile_options: Mapping[str, JsonValue] = field(default_factory=dict)
    training_defaults: Mapping[str, JsonValue] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""
    weights_sha256: str = ""


@dataclass(frozen=True, slots=True)
class PefHeader:
    """The few facts that decide whether a job can start at all.

    `batch_size` is that of one replica, `world_size` the smallest number of replicas that may run it, `training`
    whether it holds a training step. `writer` is the sambasim that wrote it. `compile_options` and `metadata` as in a
    document; their values are not checked.
    """

    name: str
    batch_size: int
    world_size: int
    data_parallel: bool
    training: bool
    digest: str
    version: str
    writer: str
    compile_options: Mapping[str, JsonValue] = field(default_factory=dict)
    metadata: Mapping[str, JsonValue] = field(default_factory=dict)
