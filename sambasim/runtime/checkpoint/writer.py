"""Writing a checkpoint: each rank its shard, all at once; it gets its name when everything is on the disk, or never."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from torch import Tensor

from sambasim.errors import MachineError
from sambasim.pef.canonical import canonical_json, manifest_digest
from sambasim.pef.layout import Layout
from sambasim.pef.weights import tensor_bytes
from sambasim.runtime.checkpoint import folder
from sambasim.runtime.checkpoint.claim import LOCK_FILE, Claim
from sambasim.runtime.checkpoint.manifest import Manifest, ShardModel, Span
from sambasim.runtime.checkpoint.rules import LARGEST_MANIFEST_BYTES, MANIFEST_FILE
from sambasim.runtime.checkpoint.shards import file_name, shard_layout
from sambasim.runtime.ranks import Communicator
from sambasim.runtime.watch.activity import UNWATCHED, Activity
from sambasim.units import MIB, format_bytes

_CHUNK_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a rank could not write its part."""

    rank: int
    host_name: str
    why: str


def write(
    path: Path,
    manifest: Manifest,
    spans: tuple[Span, ...],
    replicas: tuple[int, ...],
    tensors: Mapping[str, Tensor],
    communicator: Communicator,
    activity: Activity = UNWATCHED,
    held: Claim | None = None,
) -> Manifest:
    """Collective. The checkpoint `path`, of which this rank has `tensors`: `spans` of the groups, and the buffers of
    `replicas`. Returns `manifest` with its shards and its digest; those it comes with are replaced.

    held: the claim of rank 0 on the folder in which it lies

    Raises MachineError, on all ranks alike, if a rank cannot write its part. Then nothing is left, and whatever was at
    `path` is still there.
    """
    rank, count = communicator.rank, communicator.world_size
    untrained = manifest.untrained if rank == 0 else ()
    layout = shard_layout(manifest.groups, spans, manifest.buffers, replicas, untrained)
    activity.waits("waiting for peers to begin a checkpoint")
    _agree(path, _attempt(communicator, lambda: _begin(path, rank, held)), communicator)
    activity.takes_long("writing a checkpoint")
    file = folder.partial_of(path) / file_name(rank, count)
    sha256: list[str] = []
    failed = _attempt(communicator, lambda: sha256.append(_write_shard(file, layout, tensors)))
    own = failed or ShardModel(size_bytes=layout.size_bytes, sha256=sha256[0], spans=spans, replicas=replicas)
    activity.waits("waiting for peers' parts of a checkpoint")
    everybody = communicator.all_gather_object(own)
    _refuse(path, [one for one in everybody if isinstance(one, Failed)], communicator)
    shards = tuple(one for one in everybody if isinstance(one, ShardModel))
    manifest = _with_digest(manifest.model_copy(update={"shards": shards}))
    failed = _attempt(communicator, lambda: _finish(path, manifest)) if rank == 0 else None
    _agree(path, failed, communicator)
    activity.does("going on after a checkpoint")
    return manifest


def _begin(path: Path, rank: int, held: Claim | None) -> None:
    if held is not None and not held.holds():
        gone = f"the folder that this run has claimed is not there any more, or its {LOCK_FILE} is gone"
        raise OSError(errno.ENOENT, gone)
    if rank == 0:
        folder.begin(path)


def _write_shard(file: Path, layout: Layout, tensors: Mapping[str, Tensor]) -> str:
    """Write one file, down to the disk; returns its SHA-256."""
    hashed = hashlib.sha256()
    with file.open("xb") as stream, ThreadPoolExecutor(1) as other:  # hashing takes as long as writing
        for piece in chain([memoryview(layout.header)], tensor_bytes(layout, tensors)):
            for start in range(0, len(piece), _CHUNK_BYTES):
                chunk = piece[start : start + _CHUNK_BYTES]
                hashing = other.submit(hashed.update, chunk)
                stream.write(chunk)
                hashing.result()
        stream.flush()
        os.fsync(stream.fileno())
    return hashed.hexdigest()


def _finish(path: Path, manifest: Manifest) -> None:
    data = canonical_json(manifest.model_dump())
    if len(data) > LARGEST_MANIFEST_BYTES:
        most = format_bytes(LARGEST_MANIFEST_BYTES)
        raise OSError(errno.EFBIG, f"its {MANIFEST_FILE} would have more than {most}, and nobody would read it")
    with (folder.partial_of(path) / MANIFEST_FILE).open("xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    folder.publish(path)


def _with_digest(manifest: Manifest) -> Manifest:
    return manifest.model_copy(update={"digest": manifest_digest(manifest.model_dump())})


def _attempt(communicator: Communicator, deed: Callable[[], None]) -> Failed | None:
    try:
        deed()
    except OSError as error:
        return Failed(communicator.rank, communicator.host_name, error.strerror or type(error).__name__)
    return None


def _agree(path: Path, failed: Failed | None, communicator: Communicator) -> None:
    """Collective. Raises if a rank failed."""
    _refuse(path, [one for one in communicator.all_gather_object(failed) if one is not None], communicator)


def _refuse(path: Path, failures: Sequence[Failed], communicator: Communicator) -> None:
    """Raises MachineError for the first of `failures`, the same on all ranks, once what was begun is gone."""
    if not failures:
        return
    if communicator.rank == 0:
        with suppress(OSError):
            shutil.rmtree(folder.partial_of(path))
    communicator.barrier()
    first = failures[0]
    raise MachineError(
        f"checkpoint {path.name} cannot be written: {first.why}",
        where=f"rank {first.rank} on {first.host_name}, {path.parent}",
        remedy="make room there, or another place that all hosts see: --checkpoint-dir FOLDER",
    )
