"""The format of a checkpoint, 3.2: `checkpoint.json`, pieces of tensors, and reading them, all checked first."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from re import compile as pattern
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator
from pydantic_core import from_json
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sambasim import __version__
from sambasim.collectives.slices import Slice
from sambasim.errors import CheckpointError
from sambasim.ir.program import ParameterGroup, Program, state_name
from sambasim.ir.types import DTYPE_BYTES, Cut, SymbolKind
from sambasim.pef.document import WRITER, PartDigests, part_digests
from sambasim.runtime.checkpoint.folder import MANIFEST_FILE
from sambasim.runtime.device import DeviceMemory
from sambasim.runtime.parts import joined, part_of
from sambasim.runtime.plan import Position
from sambasim.runtime.setup import Setup
from sambasim.runtime.training import Totals
from sambasim.units import MIB

FORMAT_NAME: Final = "sambasim-checkpoint"
FORMAT_VERSION = "3.2"
SAVED_KINDS = (SymbolKind.PARAMETER, SymbolKind.OPTIMIZER_STATE, SymbolKind.BUFFER)
MAX_MANIFEST_BYTES = 64 * MIB
MOST_RANKS = 1 << 20
EXACT_SYNC = "fixed order of addition"

_KEY = pattern(r"(.+)\[([0-9]{1,18}):([0-9]{1,18})\]")

Count = Annotated[int, Field(ge=0, le=1 << 62)]
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


class PositionModel(StrictModel):
    step: Count
    epoch: Count
    used: Count


class LossScaleModel(StrictModel):
    value: Annotated[float, Field(gt=0)]
    good_steps: Count
    tolerated: Count


class ProgressModel(StrictModel):
    """The counts of the summary so far. `samples` are those of all replicas; `loss_scale` is for float16."""

    samples: Count
    loss_first: Annotated[float | None, Field(strict=False)]  # not strict: NaN and infinities are strings
    first_nonfinite_step: Count | None
    skipped_steps: Count
    loss_scale: LossScaleModel | None = None


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
    version: str = FORMAT_VERSION
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
        """The SHA-256 of everything but `digest`; with the digests of the shards it covers the whole checkpoint."""
        body = self.model_copy(update={"digest": ""})
        return hashlib.sha256(body.model_dump_json().encode()).hexdigest()

    def at(self, position: Position, totals: Totals) -> "Manifest":
        progress = ProgressModel(
            samples=totals.samples,
            loss_first=totals.loss_first if position.step else None,
            first_nonfinite_step=totals.first_nonfinite_step,
            skipped_steps=totals.skipped_steps,
            loss_scale=None if totals.loss_scale is None else LossScaleModel(**asdict(totals.loss_scale)),
        )
        place = PositionModel(step=position.step, epoch=position.epoch, used=position.used)
        return self.model_copy(update={"position": place, "progress": progress})

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
        position=PositionModel(step=0, epoch=0, used=0),
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


class Piece(NamedTuple):
    """Elements of a flat tensor, or of a part of one, from `start` on, in a view of device memory."""

    kind: SymbolKind
    symbol: str
    name: str
    start: int
    data: Tensor
    is_cut: bool = False

    @property
    def key(self) -> str:
        return piece_key(self.name, self.start, self.start + self.data.numel())


def piece_key(name: str, start: int, stop: int) -> str:
    """The name in a shard: `blocks__0__weight[0:65536]`."""
    return f"{name}[{start}:{stop}]"


def buffer_name(replica: int, chip: int, name: str) -> str:
    """The name in a shard before the range: `replica 1/bn__running_mean`. Every replica has buffers of its own,
    and every chip that shares its batch: `replica 1/chip 1/bn__running_mean` is of the second one."""
    return f"replica {replica}/{f'chip {chip}/' if chip else ''}{name}"


def part_name(name: str, cuts: Sequence[Cut], at: Mapping[str, int]) -> str:
    """The name in a shard of the part that the rank at `at` holds: `tp 1/blocks__0__weight` if the tensor is cut."""
    return "".join(f"{cut.axis} {at[cut.axis]}/" for cut in cuts) + name


def pieces_of(
    program: Program,
    memory: DeviceMemory,
    slice_of: Callable[[ParameterGroup], Slice],
    at: Mapping[str, int] = MappingProxyType({}),
) -> Iterator[Piece]:
    """The parts of the trained parameters and optimizer states in `memory` that lie in a slice of each group. `at`: the
    coordinates of the rank."""
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
                cuts = program.symbols[name].cuts
                data = memory.tensor(name).view(-1)[low:high]
                yield Piece(kind, name, part_name(name, cuts, at), low, data, bool(cuts))


class _Place(NamedTuple):
    """Where elements `start` to `stop` of a flat tensor are: in the file `shard`, under the name `key`."""

    start: int
    stop: int
    shard: str
    key: str


class Checkpoint:
    """The complete checkpoint in the folder `path`. Tensors are flat and go by symbol name, buffers by `buffer_name`.
    Raises CheckpointError. `check_content` checks the elements."""

    def __init__(self, path: Path) -> None:
        self.manifest = manifest = _read_manifest(path)
        self.path = path
        self._files: dict[str, Any] = {name: _open_shard(path, manifest, name) for name in manifest.shards}
        self._pieces: dict[str, list[_Place]] = {}
        self._index()

    def read(self, name: str, start: int, into: Tensor) -> None:
        stop = start + into.numel()
        for piece in self._pieces[name]:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                data = self._files[piece.shard].get_tensor(piece.key)
                into[low - start : high - start].copy_(data[low - piece.start : high - piece.start])

    def read_part(
        self, name: str, cuts: Sequence[Cut], at: Mapping[str, int], start: int, into: Tensor, prefix: str = ""
    ) -> None:
        """As `read`, of the part that the rank at `at` has of the tensor `name` if it is cut by `cuts`: the run that
        wrote the checkpoint may have cut it otherwise. `prefix`: that of `buffer_name`."""
        saved = self.manifest.tensors[name]
        if saved.cuts == tuple(cuts):
            self.read(prefix + part_name(name, cuts, at), start, into)
            return
        parts = []
        for position in range(saved.cuts[0].parts if saved.cuts else 1):
            part = torch.empty(saved.shape, dtype=into.dtype)
            there = {cut.axis: position for cut in saved.cuts}
            self.read(prefix + part_name(name, saved.cuts, there), 0, part.view(-1))
            parts.append(part)
        whole = joined(parts, saved.cuts[0]) if saved.cuts else parts[0]
        into.copy_(part_of(whole, cuts, at).reshape(-1)[start : start + into.numel()])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, model in _all_tensors(self.manifest):
            parts = [self._files[piece.shard].get_tensor(piece.key) for piece in sorted(self._pieces[name])]
            empty = torch.empty(0, dtype=getattr(torch, model.dtype))
            yield name, parts[0] if len(parts) == 1 else torch.cat([empty, *parts])

    def _index(self) -> None:
        for shard, file in self._files.items():
            for key in file.keys():  # noqa: SIM118 -- not a dictionary
                if not (match := _KEY.fullmatch(key)):
                    raise damaged(self.path, shard, f"it holds {key!r}, which is no piece of a tensor")
                piece = _Place(int(match[2]), int(match[3]), shard, key)
                self._pieces.setdefault(match[1], []).append(piece)
        known = set()
        for name, model in _all_tensors(self.manifest):
            known.add(name)
            at = 0
            for piece in sorted(self._pieces.setdefault(name, [])):
                data = self._files[piece.shard].get_tensor(piece.key)
                if piece.start != at or data.shape != (piece.stop - at,) or str(data.dtype) != f"torch.{model.dtype}":
                    found = f"{data.dtype}{list(data.shape)}"
                    raise damaged(self.path, piece.shard, f"{piece.key} does not fit: element {at} is next, is {found}")
                at = piece.stop
            if at != (numel := math.prod(model.shape)):
                raise damaged(self.path, "its shards", f"they hold {at} of {numel} elements of {name}")
        for other in [pieces[0] for name, pieces in self._pieces.items() if name not in known]:
            raise damaged(self.path, other.shard, f"{other.key} is no piece of a tensor of the manifest")


def check_content(checkpoint: Checkpoint, shards: Sequence[str]) -> None:
    """Compare every byte of these shards with their digests. Raises CheckpointError."""
    for name in shards:
        try:
            with (checkpoint.path / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _unreadable(checkpoint.path, name, error) from error
        if found != checkpoint.manifest.shards[name].sha256:
            raise damaged(checkpoint.path, name, "its content is not what was written: its SHA-256 differs")


def check(path: Path) -> Checkpoint:
    checkpoint = Checkpoint(path)
    check_content(checkpoint, list(checkpoint.manifest.shards))
    return checkpoint


def damaged(path: Path, part: str, what: str) -> CheckpointError:
    remedy = "use another checkpoint; run --resume auto takes the newest that is undamaged"
    return CheckpointError(f"{path.name} is damaged: {part}: {what}", where=str(path), remedy=remedy, is_damage=True)


def _all_tensors(manifest: Manifest) -> Iterator[tuple[str, TensorModel]]:
    """Every tensor that the shards must hold, by its name there: each part of a cut one, each replica's buffers."""
    for name, model in manifest.tensors.items():
        axes = [cut.axis for cut in model.cuts]
        for positions in product(*(range(cut.parts) for cut in model.cuts)):
            part = part_name(name, model.cuts, dict(zip(axes, positions, strict=True)))
            if model.kind is SymbolKind.BUFFER:
                for replica, chip in product(range(manifest.run.replicas), range(manifest.run.chips)):
                    yield buffer_name(replica, chip, part), model
            else:
                yield part, model


def _unreadable(path: Path, name: str, error: OSError) -> CheckpointError:
    """Not damage: it may be readable later, or for another user."""
    what = f"{name} of {path.name} cannot be read: {error.strerror or error}"
    return CheckpointError(what, where=str(path), remedy="check the disk and the permissions")


def _size(path: Path, name: str) -> int:
    """Bytes of a file of the checkpoint. Raises CheckpointError if it is not a regular one; a pipe would block."""
    try:
        if not (path / name).is_file():
            raise damaged(path, name, "it is not there, or not a regular file")
        return (path / name).stat().st_size
    except OSError as error:
        raise _unreadable(path, name, error) from error


def _read_manifest(path: Path) -> Manifest:
    if _size(path, MANIFEST_FILE) > MAX_MANIFEST_BYTES:
        raise damaged(path, MANIFEST_FILE, f"it is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        data = (path / MANIFEST_FILE).read_bytes()
    except OSError as error:
        raise _unreadable(path, MANIFEST_FILE, error) from error
    try:
        fields = from_json(data)
    except ValueError as error:
        raise damaged(path, MANIFEST_FILE, f"it is not JSON: {error}") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT_NAME:
        raise damaged(path, MANIFEST_FILE, f'it is not a JSON object whose "format" is "{FORMAT_NAME}"')
    version = fields.get("version")
    if not isinstance(version, str):
        raise damaged(path, MANIFEST_FILE, "its format version is no version")
    if version != FORMAT_VERSION:
        writer = ascii(fields.get("writer"))[1:-1][:40]
        found = ascii(version)[1:-1][:40]
        what = f"it is a checkpoint of format {found}, written by {writer}; {WRITER} reads format {FORMAT_VERSION}"
        raise CheckpointError(f"{path.name}: {what}", where=str(path), remedy=f"resume it with {writer}")
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise damaged(path, MANIFEST_FILE, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if manifest.digest != manifest.right_digest():
        raise damaged(path, MANIFEST_FILE, "it was changed after it was written: its digest differs")
    return manifest


def _open_shard(path: Path, manifest: Manifest, name: str) -> Any:
    if Path(name).name != name:
        raise damaged(path, MANIFEST_FILE, f"a shard called {name!r} would lie outside the checkpoint")
    if (size_bytes := _size(path, name)) != (right := manifest.shards[name].size_bytes):
        raise damaged(path, name, f"it has {size_bytes} bytes instead of {right}")
    try:
        return safe_open(path / name, "pt")
    except SafetensorError as error:
        raise damaged(path, name, f"it is not a safetensors file: {error}") from error
    except OSError as error:
        raise _unreadable(path, name, error) from error
