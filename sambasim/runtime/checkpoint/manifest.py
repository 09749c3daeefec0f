"""The schema of `checkpoint.json`: frozen models that refuse unknown keys."""

from typing import Annotated, Final, Literal

from pydantic import Field, JsonValue

from sambasim.pef.manifest import Sha256, Shape, Size, StrictModel, Version
from sambasim.pef.parts import PartDigests

FORMAT_NAME: Final = "sambasim-checkpoint"
FORMAT_VERSION = (1, 0)

MOST_SHARDS = 1 << 20
"""A shard a rank; far more ranks than anything here was tried with."""

Number = int | float | Literal["=inf", "=-inf", "=nan"]
"""Tagged, as in a PEF, where JSON has no such number."""

Span = tuple[Size, Size]
"""Elements of a group's flat tensors: from the first up to the second."""


class PefModel(StrictModel):
    """What was trained."""

    name: str
    digest: Sha256
    batch_size: Size
    parts: PartDigests


class PositionModel(StrictModel):
    """runtime.plan.Position."""

    step: Size
    epoch: Size
    used: Size


class ProgressModel(StrictModel):
    """What a summary will say of the steps before the checkpoint. `samples` counts those of all replicas. The
    optimizer has taken as many steps as the run, but for `skipped_steps`."""

    samples: Size
    loss_first: Number | None
    first_nonfinite_step: Size | None
    skipped_steps: Size = 0


class RunModel(StrictModel):
    """What decides the bits of a run beside its options: `samples` is the size of the data set that it trains on."""

    world_size: Annotated[int, Field(ge=1, le=MOST_SHARDS)]
    samples: Size
    threads: Annotated[int, Field(ge=1)]
    engine: str
    gradient_sync: str
    torch: str
    cpu: str


class MemberModel(StrictModel):
    """One parameter of a group: its name, and where it lies in the group's flat tensors."""

    parameter: str
    start: Size
    numel: Size


class GroupModel(StrictModel):
    """Flat tensors of one length: the parameters, and each state of their optimizer."""

    name: str
    dtype: str
    numel: Size
    states: tuple[str, ...]
    members: tuple[MemberModel, ...]


class TensorModel(StrictModel):
    """A tensor that lies in no group: a buffer, of which each replica has one, or a parameter that is not trained."""

    name: str
    dtype: str
    shape: Shape


class ShardModel(StrictModel):
    """One file. `spans` has what it holds of each group, in order; `replicas` are those whose buffers it holds."""

    size_bytes: Size
    sha256: Sha256
    spans: tuple[Span, ...]
    replicas: tuple[Size, ...]


class Manifest(StrictModel):
    """All of `checkpoint.json`. `format`, `version` and `writer` keep their place and meaning in each version to come.

    `options` are those of the data, the loss, the optimizer and the training, as they were resolved.
    """

    format: Literal["sambasim-checkpoint"]
    version: Version
    writer: str
    digest: Sha256
    pef: PefModel
    position: PositionModel
    progress: ProgressModel
    run: RunModel
    options: dict[str, JsonValue]
    groups: tuple[GroupModel, ...]
    buffers: tuple[TensorModel, ...]
    untrained: tuple[TensorModel, ...]
    shards: Annotated[tuple[ShardModel, ...], Field(min_length=1, max_length=MOST_SHARDS)]
