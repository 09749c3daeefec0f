"""Reading a checkpoint. Everything is checked before anything is used."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from re import compile as pattern
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from pydantic_core import from_json
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sambasim.errors import CheckpointError
from sambasim.ir.types import SymbolKind
from sambasim.pef.document import WRITER
from sambasim.runtime.checkpoint.folder import MANIFEST_FILE
from sambasim.runtime.checkpoint.manifest import FORMAT_NAME, FORMAT_VERSION, Manifest, TensorModel, buffer_name
from sambasim.units import MIB

LARGEST_MANIFEST_BYTES = 64 * MIB
"""GPT-2 small takes about 100 KiB."""

_KEY = pattern(r"(.+)\[([0-9]{1,18}):([0-9]{1,18})\]")


class _Place(NamedTuple):
    """Elements `start` to `stop` of a flat tensor are in the file `shard`, under the name `key`."""

    start: int
    stop: int
    shard: str
    key: str


class Checkpoint:
    """A checkpoint that is complete. Tensors are flat and go by symbol name, buffers by `buffer_name`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        """Opens the shards in `path`. Raises CheckpointError if they do not hold the tensors of `manifest`."""
        self.path = path
        self.manifest = manifest
        self._files: dict[str, Any] = {name: _open_shard(path, manifest, name) for name in manifest.shards}
        self._pieces: dict[str, list[_Place]] = {}
        self._index()

    def read(self, name: str, start: int, into: Tensor) -> None:
        """Copy elements of a tensor, from `start` on, into a flat one."""
        stop = start + into.numel()
        for piece in self._pieces[name]:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                data = self._files[piece.shard].get_tensor(piece.key)
                into[low - start : high - start].copy_(data[low - piece.start : high - piece.start])

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by name: views of the file, or a copy where several pieces make one."""
        for name, model in _all_tensors(self.manifest):
            parts = [self._files[piece.shard].get_tensor(piece.key) for piece in sorted(self._pieces[name])]
            yield name, parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=model.torch_dtype), *parts])

    def _index(self) -> None:
        """Find the pieces of each tensor, and check that they are all there, once."""
        for shard, file in self._files.items():
            for key in file.keys():  # noqa: SIM118 -- not a dictionary
                if not (match := _KEY.fullmatch(key)):
                    raise damaged(self.path, shard, f"it holds {key!r}, which is no piece of a tensor")
                piece = _Place(int(match[2]), int(match[3]), shard, key)
                self._pieces.setdefault(match[1], []).append(piece)
        known = 0
        for name, model in _all_tensors(self.manifest):
            at = 0
            for piece in sorted(self._pieces.setdefault(name, [])):
                data = self._files[piece.shard].get_tensor(piece.key)
                if piece.start != at or data.shape != (piece.stop - at,) or str(data.dtype) != f"torch.{model.dtype}":
                    found = f"{data.dtype}{list(data.shape)}"
                    raise damaged(self.path, piece.shard, f"{piece.key} does not fit: element {at} is next, is {found}")
                at = piece.stop
            if at != model.numel:
                what = f"they hold {at} of {model.numel} elements of {name}"
                raise damaged(self.path, "its shards", what)
            known += 1
        if len(self._pieces) > known:
            names = dict(_all_tensors(self.manifest))
            other = next(pieces[0] for name, pieces in self._pieces.items() if name not in names)
            raise damaged(self.path, other.shard, f"{other.key} is no piece of a tensor of the manifest")


def read(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`. Does not read the elements of its tensors: `check_content` does.

    Raises CheckpointError.
    """
    return Checkpoint(path, _read_manifest(path))


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
    """The checkpoint in `path`, every byte of it checked. Raises CheckpointError."""
    checkpoint = read(path)
    check_content(checkpoint, list(checkpoint.manifest.shards))
    return checkpoint


def damaged(path: Path, part: str, what: str) -> CheckpointError:
    """The error for a checkpoint at `path`, of which `part` is wrong."""
    remedy = "use another checkpoint; run --resume auto takes the newest that is undamaged"
    return CheckpointError(f"{path.name} is damaged: {part}: {what}", where=str(path), remedy=remedy, is_damage=True)


def _all_tensors(manifest: Manifest) -> Iterator[tuple[str, TensorModel]]:
    for name, model in manifest.tensors.items():
        if model.kind is SymbolKind.BUFFER:
            for replica in range(manifest.run.world_size):
                yield buffer_name(replica, name), model
        else:
            yield name, model


def _unreadable(path: Path, name: str, error: OSError) -> CheckpointError:
    """Not damage: another time, or for another user, it may be readable."""
    what = f"{name} of {path.name} cannot be read: {error.strerror or error}"
    return CheckpointError(what, where=str(path), remedy="check the disk and the permissions")


def _size(path: Path, name: str) -> int:
    """Bytes of a regular file of the checkpoint. Raises CheckpointError if it is none; a pipe would block."""
    try:
        if not (path / name).is_file():
            raise damaged(path, name, "it is not there, or not a regular file")
        return (path / name).stat().st_size
    except OSError as error:
        raise _unreadable(path, name, error) from error


def _read_manifest(path: Path) -> Manifest:
    if _size(path, MANIFEST_FILE) > LARGEST_MANIFEST_BYTES:
        raise damaged(path, MANIFEST_FILE, f"it is larger than {LARGEST_MANIFEST_BYTES} bytes")
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
    version, own = fields.get("version"), ".".join(map(str, FORMAT_VERSION))
    if not isinstance(version, str):
        raise damaged(path, MANIFEST_FILE, "its format version is no version")
    if version != own:
        writer = ascii(fields.get("writer"))[1:-1][:40]
        found = ascii(version)[1:-1][:40]
        what = f"it is a checkpoint of format {found}, written by {writer}; {WRITER} reads format {own}"
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
