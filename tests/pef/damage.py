"""Making damaged PEFs: take one apart, change a piece, and put it together again with all checksums right."""

import hashlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sambasim.pef.archive import write_archive

Fields = dict[str, Any]
Change = Callable[[bytes], bytes]


def pack(manifest: bytes, weights: bytes) -> bytes:
    """The archive of two members, whatever is in them."""
    file = io.BytesIO()
    write_archive(file, [memoryview(weights)], len(weights), lambda sha256: manifest)
    return file.getvalue()


def unpack(data: bytes) -> tuple[Fields, bytes]:
    """The fields of the manifest, and the member with the weights."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return json.loads(archive.read("pef.json")), archive.read("weights.safetensors")


def put_together(fields: Fields, weights: bytes) -> bytes:
    """A PEF of these fields and weights, whose digest is right."""
    sealed = fields | {"weights_sha256": hashlib.sha256(weights).hexdigest()}
    return pack(json.dumps(sealed, separators=(",", ":")).encode(), weights)


def change_members(path: Path, manifest: Change = bytes, weights: Change = bytes) -> None:
    """Changes bytes of the members of the PEF at `path`; the checksums of the archive are made right again, and not the
    digest of the weights in the manifest."""
    with zipfile.ZipFile(path) as archive:
        members = archive.read("pef.json"), archive.read("weights.safetensors")
    path.write_bytes(pack(manifest(members[0]), weights(members[1])))


def change_fields(path: Path, change: Callable[[Fields], object]) -> None:
    """Changes the manifest of the PEF at `path` in place."""

    def rewrite(manifest: bytes) -> bytes:
        fields = json.loads(manifest)
        change(fields)
        return json.dumps(fields, separators=(",", ":")).encode()

    change_members(path, rewrite)


def replace_bytes(path: Path, old: bytes, new: bytes) -> None:
    """Replaces the first occurrence of `old` in the file, and nothing else."""
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
