"""`checkpoint.json`: what a checkpoint says of its run, of its tensors and of itself, and reading it, checked."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from sambasim import __version__
from sambasim.bounded import Misfit, OtherFormat, OtherVersion, parse_versioned
from sambasim.errors import CheckpointError
from sambasim.ir.types import DTYPE_BYTES, Cut, SymbolKind
from sambasim.pef.document import WRITER, PartDigests, part_digests
from sambasim.records import Count
from sambasim.runtime.checkpoint.folder import MANIFEST_FILE
from sambasim.runtime.run.plan import BEGINNING, Position
from sambasim.runtime.run.setup import Setup
from sambasim.runtime.run.training import LossScale, Totals
from sambasim.units import MIB

FORMAT_NAME: Final = "sambasim-checkpoint"
FORMAT_VERSION: Final = "3.2"
SAVED_KINDS = (SymbolKind.PARAMETER, SymbolKind.OPTIMIZER_STATE, SymbolKind.BUFFER)
MAX_MANIFEST_BYTES = 64 * MIB
MOST_RANKS = 1 << 20
EXACT_SYNC = "fixed order of addition"

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="strings")


class PefModel(StrictModel):
    name: str
    digest: Sha256
    batch_size: Count
    parts: PartDigests
    compile_options: dict[str, JsonValue]
    operators_sha256: str  # of the model, whatever its mesh and batch size
    integers_sha256: str  # of those of its operators that may depend on `batch_size`


class ProgressModel(StrictModel):
    """The counts of the summary so far. `samples` are those of all replicas; `loss_scale` is for float16."""

    samples: Count
    loss_first: Annotated[float | None, Field(strict=False)]  # not strict: NaN and infinities are strings
    first_nonfinite_step: Count | None
    skipped_steps: Count
    loss_scale: LossScale | None = None


class RunModel(StrictModel):
    """What decides the bits of a run besides its options. `chips`: those that share the batch of a replica; `samples`:
    the size of the training data."""

    replicas: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    chips: Annotated[int, Field(ge=1, le=MOST_RANKS)]
    samples: Count
    threads: Annotated[int, Field(ge=1)]
    engine: str
    gradient_sync: str
    torch: str
    cpu: str

    @model_validator(mode="after")
    def _chips_are_ranks(self) -> Self:
        if self.replicas * self.chips > MOST_RANKS:
            raise ValueError(f"{self.replicas} replicas of {self.chips} chips")
        return self

    @property
    def replicas_and_chips(self) -> str:
        return f"{self.replicas} of {self.chips} chips" if self.chips > 1 else str(self.replicas)


class TensorModel(StrictModel):
    """A tensor of the program; if it is cut, `shape` is that of a part."""

    kind: SymbolKind
    dtype: Annotated[str, Field(pattern=f"^({'|'.join(DTYPE_BYTES)})$")]
    shape: Annotated[tuple[Count, ...], Field(max_length=64)]
    cuts: Annotated[tuple[Cut, ...], Field(max_length=1)] = ()

    @property
    def whole(self) -> tuple[object, ...]:
        """What does not depend on the mesh: the kind, the dtype, and the shape of the whole tensor."""
        shape = list(self.shape)
        for cut in self.cuts:
            shape[cut.dim] *= cut.parts
        return self.kind, self.dtype, tuple(shape)

    @model_validator(mode="after")
    def _parts_are_ranks(self) -> Self:
        if any(not 1 <= cut.parts <= MOST_RANKS for cut in self.cuts):
            raise ValueError(f"it is cut into {self.cuts[0].parts} parts")
        return self


class ShardModel(StrictModel):
    size_bytes: Count
    sha256: Sha256


class Manifest(StrictModel):
    """All of `checkpoint.json`. `format`, `version` and `writer` keep their meaning in every later version. `tensors`
    go by symbol name, `shards` by file name."""

    format: Literal["sambasim-checkpoint"] = FORMAT_NAME
    version: Literal["3.2"] = FORMAT_VERSION
    writer: str = f"sambasim {__version__}"
    digest: str = ""
    pef: PefModel
    position: Position
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
        """The SHA-256 of everything but `digest`; with the digests of the shards it covers the whole checkpoint."""
        body = self.model_copy(update={"digest": ""})
        return hashlib.sha256(body.model_dump_json().encode()).hexdigest()

    def at(self, position: Position, totals: Totals) -> "Manifest":
        progress = ProgressModel(
            samples=totals.samples,
            loss_first=totals.loss_first if position.step else None,
            first_nonfinite_step=totals.first_nonfinite_step,
            skipped_steps=totals.skipped_steps,
            loss_scale=totals.loss_scale and replace(totals.loss_scale),
        )
        return self.model_copy(update={"position": position, "progress": progress})

    def sealed(self, shards: dict[str, ShardModel]) -> "Manifest":
        """The complete manifest: with `shards` and the right digest."""
        complete = self.model_copy(update={"shards": shards})
        return complete.model_copy(update={"digest": complete.right_digest()})


def describe(setup: Setup, samples: int) -> Manifest:
    """The manifest of a run before its first step, without shards. `samples` is the size of the training data."""
    program = setup.program
    return Manifest(
        pef=PefModel(
            name=program.name,
            digest=setup.document.digest,
            batch_size=program.batch_size,
            parts=part_digests(setup.document),
            compile_options=dict(setup.document.compile_options),
            operators_sha256=setup.document.metadata.get("operators_sha256", ""),
            integers_sha256=setup.document.metadata.get("integers_sha256", ""),
        ),
        position=BEGINNING,
        progress=ProgressModel(samples=0, loss_first=None, first_nonfinite_step=None, skipped_steps=0),
        run=RunModel(
            replicas=setup.replicas,
            chips=setup.program.chips,
            samples=samples,
            threads=setup.threads,
            engine=setup.options.engine,
            gradient_sync="gloo" if setup.host_sync == "gloo" and setup.shards > 1 else EXACT_SYNC,
            torch=torch.__version__,
            cpu=setup.instructions,
        ),
        options={**setup.option_tables, "on_nonfinite": setup.options.on_nonfinite},
        tensors={
            name: TensorModel(kind=symbol.kind, dtype=symbol.type.dtype, shape=symbol.type.shape, cuts=symbol.cuts)
            for name, symbol in program.symbols.items()
            if symbol.kind in SAVED_KINDS
        },
        shards={},
    )


def damaged(path: Path, part: str, what: str) -> CheckpointError:
    remedy = "use another checkpoint; run --resume auto takes the newest that is undamaged"
    return CheckpointError(f"{path.name} is damaged: {part}: {what}", where=str(path), remedy=remedy, is_damage=True)


def unreadable(path: Path, name: str, error: OSError) -> CheckpointError:
    """Not damage: it may be readable later, or for another user."""
    what = f"{name} of {path.name} cannot be read: {error.strerror or error}"
    return CheckpointError(what, where=str(path), remedy="check the disk and the permissions")


def size_of(path: Path, name: str) -> int:
    """Bytes of a file of the checkpoint. Raises CheckpointError if it is not a regular one; a pipe would block."""
    try:
        if not (path / name).is_file():
            raise damaged(path, name, "it is not there, or not a regular file")
        return (path / name).stat().st_size
    except OSError as error:
        raise unreadable(path, name, error) from error


def read_manifest(path: Path) -> Manifest:
    if size_of(path, MANIFEST_FILE) > MAX_MANIFEST_BYTES:
        raise damaged(path, MANIFEST_FILE, f"it is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        data = (path / MANIFEST_FILE).read_bytes()
        manifest = parse_versioned(data, Manifest.model_validate_json, FORMAT_NAME, FORMAT_VERSION)
    except OSError as error:
        raise unreadable(path, MANIFEST_FILE, error) from error
    except OtherFormat as error:
        raise damaged(path, MANIFEST_FILE, f'its key "format" is not "{FORMAT_NAME}"') from error
    except OtherVersion as error:
        what = f"{path.name}: it is a checkpoint of {error}; {WRITER} reads format {FORMAT_VERSION}"
        raise CheckpointError(what, where=str(path), remedy=f"resume it with {error.writer}") from error
    except Misfit as error:
        raise damaged(path, MANIFEST_FILE, str(error)) from error
    if manifest.digest != manifest.right_digest():
        raise damaged(path, MANIFEST_FILE, "it was changed after it was written: its digest differs")
    return manifest
