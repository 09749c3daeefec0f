"""What a checkpoint holds: the schema of `checkpoint.json`, and the flat pieces of tensors in the shards."""

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Final, Literal, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from torch import Tensor

from sambasim import __version__
from sambasim.collectives.slices import Slice
from sambasim.ir.program import ParameterGroup, Program
from sambasim.ir.types import DTYPE_BYTES, SymbolKind
from sambasim.ir.verify import state_name
from sambasim.pef.document import PartDigests, part_digests
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.plan import Position
from sambasim.runtime.setup import Setup
from sambasim.runtime.training import Totals

FORMAT_NAME: Final = "sambasim-checkpoint"
FORMAT_VERSION = (2, 0)
SAVED_KINDS = (SymbolKind.PARAMETER, SymbolKind.OPTIMIZER_STATE, SymbolKind.BUFFER)
"""The kinds of symbol that a checkpoint holds. Every replica has buffers of its own."""

Count = Annotated[int, Field(ge=0, le=1 << 62)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="strings")


class PefModel(StrictModel):
    """The PEF that was trained."""

    name: str
    digest: Sha256
    batch_size: Count
    parts: PartDigests


class PositionModel(StrictModel):
    """runtime.plan.Position."""

    step: Count
    epoch: Count
    used: Count


class ProgressModel(StrictModel):
    """What the summary says about the steps so far. `samples` counts those of all replicas."""

    samples: Count
    loss_first: Annotated[float | None, Field(strict=False)]  # not strict: NaN and infinities are strings
    first_nonfinite_step: Count | None
    skipped_steps: Count


class RunModel(StrictModel):
    """What decides the bits of a run besides its options. `samples` is the size of the training data."""

    world_size: Annotated[int, Field(ge=1, le=1 << 20)]
    samples: Count
    threads: Annotated[int, Field(ge=1)]
    engine: str
    gradient_sync: str
    torch: str
    cpu: str


class TensorModel(StrictModel):
    """A whole tensor. Shards hold flat pieces of it."""

    kind: SymbolKind
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(DTYPE_BYTES)})$")]
    shape: Annotated[tuple[Count, ...], Field(max_length=64)]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype


class ShardModel(StrictModel):
    """One safetensors file."""

    size_bytes: Count
    sha256: Sha256


class Manifest(StrictModel):
    """All of `checkpoint.json`. `format`, `version` and `writer` keep their meaning in every later version.

    `options` are the resolved options of data, loss, optimizer and training; `tensors` go by symbol name, `shards` by
    file name.
    """

    format: Literal["sambasim-checkpoint"] = FORMAT_NAME
    version: str = ".".join(map(str, FORMAT_VERSION))
    writer: str = f"sambasim {__version__}"
    digest: str = ""
    pef: PefModel
    position: PositionModel
    progress: ProgressModel
    run: RunModel
    options: dict[str, JsonValue]
    tensors: dict[str, TensorModel]
    shards: dict[str, ShardModel]

    @model_validator(mode="after")
    def _counts_are_possible(self) -> Self:
        if self.position.used > self.run.samples:
            raise ValueError(f"{self.position.used} samples used of an epoch of {self.run.samples}")
        if self.progress.skipped_steps > self.position.step:
            raise ValueError(f"{self.progress.skipped_steps} steps skipped of {self.position.step}")
        return self

    def right_digest(self) -> str:
        """The SHA-256 of everything but `digest`. Through the digests of the shards it covers the whole checkpoint."""
        body = self.model_copy(update={"digest": ""})
        return hashlib.sha256(body.model_dump_json().encode()).hexdigest()

    def at(self, position: Position, totals: Totals) -> "Manifest":
        """The same run at a later position."""
        progress = ProgressModel(
            samples=totals.samples,
            loss_first=totals.loss_first if position.step else None,
            first_nonfinite_step=totals.first_nonfinite_step,
            skipped_steps=totals.skipped_steps,
        )
        place = PositionModel(step=position.step, epoch=position.epoch, used=position.used)
        return self.model_copy(update={"position": place, "progress": progress})

    def sealed(self, shards: dict[str, ShardModel]) -> "Manifest":
        """With `shards` and the right digest."""
        complete = self.model_copy(update={"shards": shards})
        return complete.model_copy(update={"digest": complete.right_digest()})


def describe(setup: Setup, samples: int) -> Manifest:
    """The manifest of a run before its first step, without shards. `samples` is the size of the training data."""
    program, resolved = setup.program, setup.resolved
    return Manifest(
        pef=PefModel(
            name=program.name,
            digest=setup.document.digest,
            batch_size=program.batch_size,
            parts=part_digests(setup.document),
        ),
        position=PositionModel(step=0, epoch=0, used=0),
        progress=ProgressModel(samples=0, loss_first=None, first_nonfinite_step=None, skipped_steps=0),
        run=RunModel(
            world_size=setup.world_size,
            samples=samples,
            threads=setup.threads,
            engine=setup.options.engine,
            gradient_sync="gloo" if setup.host_sync == "gloo" and setup.world_size > 1 else "fixed order of addition",
            torch=torch.__version__,
            cpu=setup.instructions,
        ),
        options={
            "data": resolved.data.model_dump(mode="json"),
            "loss": resolved.loss.model_dump(mode="json") if resolved.loss else None,
            "optimizer": resolved.optimizer.model_dump(mode="json") if resolved.optimizer else None,
            "training": resolved.training.model_dump(mode="json"),
            "on_nonfinite": setup.options.on_nonfinite,
        },
        tensors={
            name: TensorModel(kind=symbol.kind, dtype=symbol.type.dtype, shape=symbol.type.shape)
            for name, symbol in program.symbols.items()
            if symbol.kind in SAVED_KINDS
        },
        shards={},
    )


class Piece(NamedTuple):
    """Elements of a flat tensor, from `start` on: `data` is a view of device memory."""

    kind: SymbolKind
    name: str
    start: int
    data: Tensor

    @property
    def key(self) -> str:
        return piece_key(self.name, self.start, self.start + self.data.numel())


def piece_key(name: str, start: int, stop: int) -> str:
    """The name of a piece in its shard: `blocks__0__weight[0:65536]`."""
    return f"{name}[{start}:{stop}]"


def buffer_name(replica: int, name: str) -> str:
    """The name of one replica's buffer: `replica 1/bn__running_mean`."""
    return f"replica {replica}/{name}"


def pieces_of(program: Program, memory: DeviceMemory, slice_of: Callable[[ParameterGroup], Slice]) -> Iterator[Piece]:
    """The trained parameters and optimizer states in `memory`, as far as they lie in a slice of each group."""
    for group in program.groups:
        start, stop = slice_of(group)
        optimizer = program.optimizers[group.optimizer]
        for member in group.members:
            low, high = max(start - member.start, 0), min(stop - member.start, member.numel)
            if low >= high:
                continue
            symbols = [(SymbolKind.PARAMETER, member.parameter)]
            states = optimizer.states
            symbols += [(SymbolKind.OPTIMIZER_STATE, state_name(member.parameter, optimizer.name, s)) for s in states]
            for kind, name in symbols:
                yield Piece(kind, name, low, memory.tensor(name).view(-1)[low:high])
