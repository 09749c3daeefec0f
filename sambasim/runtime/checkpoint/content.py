"""The tensors of a checkpoint: pieces of them in shards, and reading them back, for any mesh."""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from re import compile as pattern
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sambasim.ir.program import ParameterGroup, Program, state_name
from sambasim.ir.types import Cut, Slice, SymbolKind
from sambasim.runtime.checkpoint.folder import MANIFEST_FILE
from sambasim.runtime.checkpoint.manifest import Manifest, TensorModel, damaged, read_manifest, size_of, unreadable
from sambasim.runtime.values.memory import DeviceMemory, joined, part_of

_KEY = pattern(r"(.+)\[([0-9]{1,18}):([0-9]{1,18})\]")


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
        self.manifest = manifest = read_manifest(path)
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
                    actual = f"{data.dtype}{list(data.shape)}"
                    raise damaged(
                        self.path, piece.shard, f"{piece.key} does not fit: element {at} is next, is {actual}"
                    )
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
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise unreadable(checkpoint.path, name, error) from error
        if sha256 != checkpoint.manifest.shards[name].sha256:
            raise damaged(checkpoint.path, name, "its content is not what was written: its SHA-256 differs")


def check(path: Path) -> Checkpoint:
    checkpoint = Checkpoint(path)
    check_content(checkpoint, list(checkpoint.manifest.shards))
    return checkpoint


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


def _open_shard(path: Path, manifest: Manifest, name: str) -> Any:
    if Path(name).name != name:
        raise damaged(path, MANIFEST_FILE, f"a shard called {name!r} would lie outside the checkpoint")
    if (size_bytes := size_of(path, name)) != (right := manifest.shards[name].size_bytes):
        raise damaged(path, name, f"it has {size_bytes} bytes instead of {right}")
    try:
        return safe_open(path / name, "pt")
    except SafetensorError as error:
        raise damaged(path, name, f"it is not a safetensors file: {error}") from error
    except OSError as error:
        raise unreadable(path, name, error) from error
