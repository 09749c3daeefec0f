"""What a checkpoint holds: `checkpoint.json`, which describes the run and the tensors, and pieces of the tensors in
shards, of which any range can be read, and any part of a tensor that was cut otherwise."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from re import compile as pattern
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sambasim.errors import MOST_REPLICAS, MOST_THREADS, CheckpointError, failing_with
from sambasim.files import Misfit, OtherVersion, in_memory, parse_file
from sambasim.ir.types import DTYPE_BYTES, HIGHEST_RANK, Cut, Ranks, Symbol, SymbolKind, TensorType
from sambasim.pef.digests import part_digests
from sambasim.pef.document import WRITER, Sha256
from sambasim.records import Count
from sambasim.runtime.checkpoint.folder import MANIFEST_FILE
from sambasim.runtime.run.plan import BEGINNING, Position
from sambasim.runtime.run.setup import Setup
from sambasim.runtime.run.training import Progress
from sambasim.runtime.values.memory import STATE, joined, part_of
from sambasim.units import MIB

FORMAT_NAME: Final = "sambasim-checkpoint"
FORMAT_VERSION: Final = "3.4"
MAX_MANIFEST_BYTES = 64 * MIB
EXACT_SYNC = "fixed order of addition"

_KEY = pattern(r"(.+)\[([0-9]{1,18}):([0-9]{1,18})\]")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_inf_nan="strings", defer_build=True)


class PefModel(_Model):
    name: str
    digest: Sha256
    batch_size: Count
    parts: dict[str, Sha256]
    compile_options: dict[str, JsonValue]
    operators_sha256: str  # of the model, whatever its mesh and batch size
    integers_sha256: str  # of those of its operators that may depend on `batch_size`


class RunModel(_Model):
    """What decides the bits of a run besides options. `chips` share the batch of a replica; `samples`: of the data;
    `data`: its identity."""

    replicas: Ranks
    chips: Ranks
    samples: Count
    data: str
    threads: Annotated[int, Field(ge=1, le=MOST_THREADS)]
    engine: str
    gradient_sync: str
    torch: str
    cpu: str

    @property
    def replicas_and_chips(self) -> str:
        return f"{self.replicas} of {self.chips} chips" if self.chips > 1 else str(self.replicas)


class ShardModel(_Model):
    size_bytes: Count
    sha256: Sha256


class Manifest(_Model):
    """All of `checkpoint.json`; `format`, `version` and `writer` keep their meaning in every later version."""

    format: Literal["sambasim-checkpoint"] = FORMAT_NAME
    version: Literal["3.4"] = FORMAT_VERSION
    writer: str = WRITER
    digest: str = ""
    pef: PefModel
    position: Position
    progress: Progress
    run: RunModel
    options: dict[str, JsonValue]
    tensors: dict[str, Symbol]
    shards: dict[str, ShardModel]

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.run.replicas * self.run.chips > MOST_REPLICAS:
            raise ValueError(f"{self.run.replicas} replicas of {self.run.chips} chips")
        if self.position.used > self.run.samples > 0:
            raise ValueError(f"{self.position.used} samples used of an epoch of {self.run.samples}")
        if self.progress.skipped_steps > self.position.step:
            raise ValueError(f"{self.progress.skipped_steps} steps skipped of {self.position.step}")
        for name, one in self.tensors.items():
            if one.type.dtype not in DTYPE_BYTES or len(one.type.shape) > HIGHEST_RANK or len(one.cuts) > 1:
                raise ValueError(f"tensors.{name} is {one.type}, with {len(one.cuts)} cuts")
            if one.name != name:
                raise ValueError(f"tensors.{name} is called {one.name}")
        return self

    def right_digest(self) -> str:
        """The SHA-256 of everything but `digest`; with the digests of the shards it covers the whole checkpoint."""
        body = self.model_copy(update={"digest": ""})
        return hashlib.sha256(body.model_dump_json().encode()).hexdigest()

    def sealed(self, shards: dict[str, ShardModel]) -> "Manifest":
        """The complete manifest: with `shards` and the right digest."""
        complete = self.model_copy(update={"shards": shards})
        return complete.model_copy(update={"digest": complete.right_digest()})

    def all_tensors(self) -> Iterator[tuple[str, TensorType]]:
        """Every tensor that the shards hold, by its name there: each part of a cut one, each replica's buffers."""
        for name, symbol in self.tensors.items():
            axes = [cut.axis for cut in symbol.cuts]
            for positions in product(*(range(cut.parts) for cut in symbol.cuts)):
                part = part_name(name, symbol.cuts, dict(zip(axes, positions, strict=True)))
                if symbol.kind is SymbolKind.BUFFER:
                    for replica, chip in product(range(self.run.replicas), range(self.run.chips)):
                        yield buffer_name(replica, chip, part), symbol.type
                else:
                    yield part, symbol.type


def states_of(manifest: Manifest) -> dict[str, dict[tuple[str, str, TensorType], str]]:
    """By parameter, its optimizer states: by kind of optimizer, name and type, their names in `tensors`."""
    found: dict[str, dict[tuple[str, str, TensorType], str]] = {}
    for name, tensor in manifest.tensors.items():
        if tensor.kind is SymbolKind.OPTIMIZER_STATE and name.count("__") > 1:  # and no average of a buffer
            parameter, optimizer, state = name.rsplit("__", 2)
            found.setdefault(parameter, {})[optimizer.rstrip("0123456789"), state, tensor.whole] = name
    return found


def describe(setup: Setup, samples: int) -> Manifest:
    """The manifest of a run before its first step, without shards. `samples` is the size of the training data."""
    program, document = setup.program, setup.document
    exact = EXACT_SYNC if setup.wire == "fp32" else f"{EXACT_SYNC} of {setup.wire}"
    return Manifest(
        pef=PefModel(
            name=program.name,
            digest=document.digest,
            batch_size=program.batch_size,
            parts=part_digests(document),
            compile_options=dict(document.compile_options),
            operators_sha256=document.metadata.get("operators_sha256", ""),
            integers_sha256=document.metadata.get("integers_sha256", ""),
        ),
        position=BEGINNING,
        progress=Progress(),
        run=RunModel(
            replicas=setup.replicas,
            chips=program.chips,
            samples=samples,
            data=setup.data_identity,
            threads=setup.threads,
            engine=setup.options.engine,
            gradient_sync="gloo" if setup.options.host_sync == "gloo" and setup.shards > 1 else exact,
            torch=torch.__version__,
            cpu=", ".join(setup.cpus),
        ),
        options={**setup.resolved.tables, "on_nonfinite": setup.options.on_nonfinite},
        tensors={name: symbol for name, symbol in program.symbols.items() if symbol.kind in STATE},
        shards={},
    )


def piece_key(name: str, start: int, stop: int) -> str:
    """The name in a shard: `blocks__0__weight[0:65536]`."""
    return f"{name}[{start}:{stop}]"


def buffer_name(replica: int, chip: int, name: str) -> str:
    """The name in a shard before the range: `replica 1/bn__running_mean`, of the second chip `replica 1/chip
    1/bn__running_mean`."""
    return f"replica {replica}/{f'chip {chip}/' if chip else ''}{name}"


def part_name(name: str, cuts: Sequence[Cut], at: Mapping[str, int]) -> str:
    """The name in a shard of the part that the rank at `at` holds: `tp 1/blocks__0__weight` if the tensor is cut."""
    return "".join(f"{cut.axis} {at[cut.axis]}/" for cut in cuts) + name


class _Place(NamedTuple):
    """Where elements `start` to `stop` of a flat tensor are: in the file `shard`, under the name `key`."""

    start: int
    stop: int
    shard: str
    key: str


class Checkpoint:
    """The checkpoint in the folder `path`, its tensors flat, by their names in the shards. Shards are compared with
    their digests: each of `ranks` processes compares others. Raises CheckpointError."""

    def __init__(self, path: Path, rank: int = 0, ranks: int = 1) -> None:
        self.manifest = _read_manifest(path)
        self.path = path
        self._files = {name: self._open(name) for name in self.manifest.shards}
        self._places: dict[str, list[_Place]] = {}
        self._index()
        for name, shard in list(self.manifest.shards.items())[rank::ranks]:
            with _reading(path, name), (path / name).open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 != shard.sha256:
                raise _damaged(path, name, "its content is not what was written: its SHA-256 differs")

    def read(self, name: str, start: int, into: Tensor) -> None:
        stop = start + into.numel()
        for place in self._places[name]:
            low, high = max(start, place.start), min(stop, place.stop)
            if low < high:
                into[low - start : high - start].copy_(self._data(place)[low - place.start : high - place.start])

    def read_part(
        self, symbol: Symbol, at: Mapping[str, int], start: int, into: Tensor, prefix: str = "", name: str | None = None
    ) -> None:
        """As `read`, of the part that the rank at `at` has of `symbol`, which may be cut otherwise in the checkpoint,
        and be called `name`. `prefix`: that of `buffer_name`."""
        name, cuts = name or symbol.name, symbol.cuts
        saved = self.manifest.tensors[name]
        if saved.cuts == cuts:
            self.read(prefix + part_name(name, cuts, at), start, into)
            return
        parts = []
        for position in range(saved.cuts[0].parts if saved.cuts else 1):
            parts.append(part := torch.empty(saved.type.shape, dtype=into.dtype))
            there = {cut.axis: position for cut in saved.cuts}
            self.read(prefix + part_name(name, saved.cuts, there), 0, part.view(-1))
        into.copy_(part_of(joined(parts, saved.cuts), cuts, at).reshape(-1)[start : start + into.numel()])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, type_ in self.manifest.all_tensors():
            parts = [self._data(place) for place in self._places[name]]
            empty = torch.empty(0, dtype=getattr(torch, type_.dtype))
            yield name, parts[0] if len(parts) == 1 else torch.cat([empty, *parts])

    def _data(self, place: _Place) -> Tensor:
        data: Tensor = self._files[place.shard].get_tensor(place.key)
        return data

    def _open(self, shard: str) -> Any:
        if Path(shard).name != shard:
            raise _damaged(self.path, MANIFEST_FILE, f"a shard called {shard!r} would lie outside the checkpoint")
        if (size_bytes := _size_of(self.path, shard)) != (right := self.manifest.shards[shard].size_bytes):
            raise _damaged(self.path, shard, f"it has {size_bytes} bytes instead of {right}")
        try:
            with _reading(self.path, shard):
                return safe_open(self.path / shard, "pt")
        except SafetensorError as error:
            raise _damaged(self.path, shard, f"it is not a safetensors file: {error}") from error

    def _index(self) -> None:
        for shard, file in self._files.items():
            for key in file.keys():  # noqa: SIM118 -- not a dictionary
                if not (match := _KEY.fullmatch(key)):
                    raise _damaged(self.path, shard, f"it holds {key!r}, which is no piece of a tensor")
                self._places.setdefault(match[1], []).append(_Place(int(match[2]), int(match[3]), shard, key))
        unknown = dict(self._places)
        for name, type_ in self.manifest.all_tensors():
            at = 0
            self._places[name] = sorted(unknown.pop(name, []))
            for place in self._places[name]:
                data = self._data(place)
                if place.start != at or data.shape != (place.stop - at,) or str(data.dtype) != f"torch.{type_.dtype}":
                    what = f"does not fit: element {at} is next, is {data.dtype}{list(data.shape)}"
                    raise _damaged(self.path, place.shard, f"{place.key} {what}")
                at = place.stop
            if at != type_.numel:
                raise _damaged(self.path, "its shards", f"they hold {at} of {type_.numel} elements of {name}")
        for place, *_ in unknown.values():
            raise _damaged(self.path, place.shard, f"{place.key} is no piece of a tensor of the manifest")


def _damaged(path: Path, part: str, what: str) -> CheckpointError:
    remedy = "use another checkpoint; run --resume auto takes the newest that is undamaged"
    return CheckpointError(f"{path.name} is damaged: {part}: {what}", where=str(path), remedy=remedy, is_damage=True)


@contextmanager
def _reading(path: Path, name: str) -> Iterator[None]:
    """Raises CheckpointError for an OSError within: no damage, it may be readable later, or for another user."""
    what, remedy = f"{name} of {path.name} cannot be read", "check the disk and the permissions"
    with failing_with(CheckpointError, what, remedy, str(path)), in_memory(path / name):
        yield


def _size_of(path: Path, name: str) -> int:
    """Bytes of a file of the checkpoint. Raises CheckpointError if it is not a regular one; a pipe would block."""
    with _reading(path, name):
        if not (path / name).is_file():
            raise _damaged(path, name, "it is not there, or not a regular file")
        return (path / name).stat().st_size


def _read_manifest(path: Path) -> Manifest:
    if _size_of(path, MANIFEST_FILE) > MAX_MANIFEST_BYTES:
        raise _damaged(path, MANIFEST_FILE, f"it is larger than {MAX_MANIFEST_BYTES} bytes")
    with _reading(path, MANIFEST_FILE):
        data = (path / MANIFEST_FILE).read_bytes()
    try:
        manifest = parse_file(data, Manifest.model_validate_json, FORMAT_NAME, FORMAT_VERSION)
    except OtherVersion as error:
        what = f"{path.name}: it is a checkpoint of {error}; {WRITER} reads format {FORMAT_VERSION}"
        raise CheckpointError(what, where=str(path), remedy=f"resume it with {error.writer}") from error
    except Misfit as error:
        raise _damaged(path, MANIFEST_FILE, str(error)) from error
    if manifest.digest != manifest.right_digest():
        raise _damaged(path, MANIFEST_FILE, "it was changed after it was written: its digest differs")
    return manifest
