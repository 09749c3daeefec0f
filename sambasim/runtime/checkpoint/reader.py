"""Reading a checkpoint: everything is checked before anything is used, and refused by the rule that it breaks."""

import hashlib
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from pydantic import ValidationError
from torch import Tensor

from sambasim.collectives.slices import CUT_ELEMENTS
from sambasim.errors import CheckpointError
from sambasim.ir.types import DTYPE_BYTES
from sambasim.pef.canonical import canonical_json, check_json_object, manifest_digest, parse_json
from sambasim.pef.layout import header_fault
from sambasim.pef.version import unread
from sambasim.pef.weights import map_tensors
from sambasim.runtime.checkpoint.manifest import FORMAT_NAME, FORMAT_VERSION, GroupModel, Manifest
from sambasim.runtime.checkpoint.rules import (
    BOUNDED,
    CANONICAL,
    CONTENT,
    DIGEST,
    FOLDER,
    FORMAT,
    GROUPS,
    HEADER,
    JSON,
    LARGEST_MANIFEST_BYTES,
    MANIFEST_FILE,
    REPLICAS,
    SCHEMA,
    SIZE,
    SPANS,
    VERSION,
    refusal,
)
from sambasim.runtime.checkpoint.shards import PARAMETER, file_name, layout_of
from sambasim.units import MIB, format_bytes

_LEAST_ENTRY_BYTES = 50
"""What a tensor takes in the header of its file, at the very least."""
_CHUNK_BYTES = 4 * MIB
_NOT_THERE = (FileNotFoundError, NotADirectoryError)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest holds, and whose shards are there with the headers that belong to it."""

    path: Path
    manifest: Manifest

    def shard_path(self, index: int) -> Path:
        return self.path / file_name(index, len(self.manifest.shards))

    def tensors(self, index: int) -> Mapping[str, Tensor]:
        """The tensors of shard `index`, by name, as views of its file: copy-on-write, read when they are touched."""
        layout = layout_of(self.manifest, index)
        with _open(self.path, self.shard_path(index).name) as file:
            return map_tensors(file, len(layout.header), layout)


def read(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`. The content of its tensors is not read: `check_content` does that.

    Raises CheckpointError.
    """
    checkpoint = Checkpoint(path, _read_manifest(path))
    for index in range(len(checkpoint.manifest.shards)):
        _check_shard(checkpoint, index)
    return checkpoint


def check_content(checkpoint: Checkpoint, shards: Sequence[int]) -> None:
    """Read every byte of these shards. Raises CheckpointError if one is not what was written."""
    for index in shards:
        name, hashed = checkpoint.shard_path(index).name, hashlib.sha256()
        with _open(checkpoint.path, name) as file:
            while chunk := file.read(_CHUNK_BYTES):
                hashed.update(chunk)
        if (found := hashed.hexdigest()) != (right := checkpoint.manifest.shards[index].sha256):
            raise refusal(checkpoint.path, CONTENT, f"its sha256 is {found}, and {right} was written", part=name)


def check(path: Path) -> Checkpoint:
    """Everything, every byte of the shards included. Raises CheckpointError."""
    checkpoint = read(path)
    check_content(checkpoint, range(len(checkpoint.manifest.shards)))
    return checkpoint


class _Reading:
    """Around the reading of one file: what the system says of it becomes a refusal."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._file: BinaryIO | None = None

    def __enter__(self) -> BinaryIO:
        path = self._folder / self._name
        try:
            # Looked at before it is opened: opening a pipe would wait for a writer for ever.
            if not stat.S_ISREG(path.lstat().st_mode):
                raise refusal(self._folder, FOLDER, f"{self._name} is not a regular file", part=self._name)
            self._file = path.open("rb")
        except OSError as error:
            raise self._failed(error) from error
        return self._file

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._file is not None:
            self._file.close()
        if isinstance(error, OSError):
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> CheckpointError:
        why = error.strerror or type(error).__name__
        what, is_damage = f"{self._name} cannot be read: {why}", isinstance(error, _NOT_THERE)
        return refusal(self._folder, FOLDER, what, part=self._name, is_damage=is_damage)


def _open(folder: Path, name: str) -> _Reading:
    return _Reading(folder, name)


def _read_manifest(path: Path) -> Manifest:
    with _open(path, MANIFEST_FILE) as file:
        data = file.read(LARGEST_MANIFEST_BYTES + 1)
    if len(data) > LARGEST_MANIFEST_BYTES:
        raise refusal(path, BOUNDED, f"it has more than {format_bytes(LARGEST_MANIFEST_BYTES)}")
    fields = _parse(data, path)
    try:
        canonical = canonical_json(fields)
    except ValueError as error:
        raise refusal(path, JSON, f"it is not strict JSON: {error}") from error
    if canonical != data:
        what = "it is not canonical JSON: a key is there twice or out of order, or spaces were added"
        raise refusal(path, CANONICAL, what)
    if fields.get("digest") != (right := manifest_digest(fields)):
        raise refusal(path, DIGEST, f"it was changed after it was written: its digest is {right}")
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise refusal(path, SCHEMA, f"{where or 'the whole'}: {fault['msg']}") from error
    try:
        check_json_object("options", manifest.options)
    except ValueError as error:
        raise refusal(path, SCHEMA, str(error)) from error
    if manifest.position.used > manifest.run.samples:
        what = f"position.used: {manifest.position.used} samples of an epoch of {manifest.run.samples}"
        raise refusal(path, SCHEMA, what)
    if manifest.progress.skipped_steps > manifest.position.step:
        what = f"progress.skipped_steps: {manifest.progress.skipped_steps} of {manifest.position.step} steps"
        raise refusal(path, SCHEMA, what)
    _check_groups(manifest, path)
    _check_spans(manifest, path)
    _check_replicas(manifest, path)
    return manifest


def _parse(data: bytes, path: Path) -> dict[str, object]:
    try:
        fields = parse_json(data)
    except ValueError as error:
        raise refusal(path, JSON, f"it is not strict JSON: {error}") from error
    if not isinstance(fields, dict):
        raise refusal(path, JSON, "it is not a JSON object")
    if fields.get("format") != FORMAT_NAME:
        raise refusal(path, FORMAT, f'its key "format" is not "{FORMAT_NAME}", so this is no checkpoint')
    fault = unread(fields, "checkpoint", FORMAT_VERSION)
    if fault is not None and fault.writer is None:
        raise refusal(path, VERSION, fault.what)
    if fault is not None:
        raise refusal(path, VERSION, fault.what, remedy=f"resume it with {fault.writer}", is_damage=False)
    return fields


def _check_groups(manifest: Manifest, path: Path) -> None:
    """Rule 9: what groups, buffers and untrained parameters say of themselves."""
    names = [group.name for group in manifest.groups]
    names += [member.parameter for group in manifest.groups for member in group.members]
    names += [one.name for one in (*manifest.buffers, *manifest.untrained)]
    if (twice := _twice(names)) is not None:
        raise refusal(path, GROUPS, f"the name {twice[:80]!r} is there twice")
    dtypes = [(group.name, group.dtype) for group in manifest.groups]
    dtypes += [(one.name, one.dtype) for one in (*manifest.buffers, *manifest.untrained)]
    for name, dtype in dtypes:
        if dtype not in DTYPE_BYTES:
            raise refusal(path, GROUPS, f"{name[:80]!r} is of {dtype[:40]!r}, which is no dtype of a tensor here")
    for group in manifest.groups:
        if (fault := _group_fault(group)) is not None:
            raise refusal(path, GROUPS, f"group {group.name[:80]!r}: {fault}")


def _group_fault(group: GroupModel) -> str | None:
    if (twice := _twice((PARAMETER, *group.states))) is not None:
        return f"the tensor {twice[:80]!r} is there twice"
    if group.numel % CUT_ELEMENTS:
        return f"it has {group.numel} elements, which is no multiple of {CUT_ELEMENTS}"
    at = 0
    for member in group.members:
        if member.start < at or member.start % CUT_ELEMENTS or member.start + member.numel > group.numel:
            return f"{member.parameter[:80]!r} cannot lie at {member.start}"
        at = member.start + member.numel
    return None


def _check_spans(manifest: Manifest, path: Path) -> None:
    """Rule 10: the shards hold each element of each group once."""
    for index, shard in enumerate(manifest.shards):
        if len(shard.spans) != len(manifest.groups):
            raise refusal(path, SPANS, f"shard {index} has {len(shard.spans)} spans of {len(manifest.groups)} groups")
    for number, group in enumerate(manifest.groups):
        held = sorted(shard.spans[number] for shard in manifest.shards if shard.spans[number] != (0, 0))
        at = 0
        for start, stop in held:
            if start != at or stop < start:
                raise refusal(path, SPANS, f"of group {group.name[:80]!r}, elements {at} to {start} are not there once")
            at = stop
        if at != group.numel:
            raise refusal(path, SPANS, f"of group {group.name[:80]!r}, elements {at} to {group.numel} are missing")


def _check_replicas(manifest: Manifest, path: Path) -> None:
    """Rule 11: the shards hold the buffers of each replica once."""
    held = sorted(replica for shard in manifest.shards for replica in shard.replicas)
    wanted = range(manifest.run.world_size)
    if len(held) != len(wanted) or any(replica != right for replica, right in zip(held, wanted, strict=True)):
        raise refusal(path, REPLICAS, f"it does not hold the buffers of each of {len(wanted)} replicas once")


def _check_shard(checkpoint: Checkpoint, index: int) -> None:
    """Rules 12 and 13: the file has the right size, and begins with the header that belongs to the manifest."""
    manifest = checkpoint.manifest
    shard, name = manifest.shards[index], checkpoint.shard_path(index).name
    with _open(checkpoint.path, name) as file:
        size_bytes = file.seek(0, 2)
        if size_bytes != shard.size_bytes:
            what = f"it has {size_bytes} bytes, and {shard.size_bytes} were written"
            raise refusal(checkpoint.path, SIZE, what, part=name)
        if len(shard.replicas) * len(manifest.buffers) * _LEAST_ENTRY_BYTES > size_bytes:
            what = f"it has {size_bytes} bytes, and is to hold {len(manifest.buffers)} buffers of each replica"
            raise refusal(checkpoint.path, SIZE, what, part=name)
        layout = layout_of(manifest, index)
        if layout.size_bytes != size_bytes:
            what = f"it has {size_bytes} bytes, and its tensors take {layout.size_bytes}"
            raise refusal(checkpoint.path, SIZE, what, part=name)
        file.seek(0)
        fault = header_fault(file.read(len(layout.header)), layout)
    if fault is not None:
        raise refusal(checkpoint.path, HEADER, fault[1], part=name)


def _twice(names: Sequence[str]) -> str | None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None
