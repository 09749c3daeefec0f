"""Making damaged PEFs: take one apart, change a piece, and put it together again with all checksums right."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sambasim.pef.archive import Frame, Member, manifest_local_header, trailer, weights_local_header
from sambasim.pef.canonical import canonical_json, manifest_digest
from sambasim.pef.frame import open_pef, read_manifest

Fields = dict[str, Any]


def pack(manifest: bytes, weights: bytes) -> bytes:
    """The archive of two members, whatever is in them."""
    frame = Frame(Member(len(manifest), zlib.crc32(manifest)), Member(len(weights), zlib.crc32(weights)))
    return manifest_local_header(frame) + manifest + weights_local_header(frame) + weights + trailer(frame)


def unpack(path: Path) -> tuple[Fields, bytes]:
    """The fields of the manifest, and the member with the weights."""
    with open_pef(path) as (file, frame):
        fields: Fields = json.loads(read_manifest(file, frame, path))
        file.seek(frame.weights_offset)
        return fields, file.read(frame.weights.size_bytes)


def seal(fields: Fields) -> bytes:
    """The manifest with the digest that its fields have now."""
    return canonical_json(fields | {"digest": manifest_digest(fields)})


def change_fields(path: Path, change: Callable[[Fields], object]) -> None:
    """Changes the manifest of the PEF at `path` in place, and seals it again."""
    fields, weights = unpack(path)
    change(fields)
    path.write_bytes(pack(seal(fields), weights))


def change_manifest(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Changes the bytes of the manifest; nothing but the checksum of the archive is made right again."""
    fields, weights = unpack(path)
    path.write_bytes(pack(change(canonical_json(fields)), weights))


def change_weights(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Changes the bytes of weights.safetensors; the manifest knows the new size, and not the new digest."""
    fields, weights = unpack(path)
    changed = change(weights)
    fields["weights"]["size_bytes"] = len(changed)
    path.write_bytes(pack(seal(fields), changed))


def change_header(path: Path, change: Callable[[Fields], object]) -> None:
    """Changes the safetensors header, which keeps its length if the change leaves room."""

    def rewrite(weights: bytes) -> bytes:
        length = int.from_bytes(weights[:8], "little")
        entries = json.loads(weights[8 : 8 + length])
        change(entries)
        text = canonical_json(entries).ljust(length)
        return len(text).to_bytes(8, "little") + text + weights[8 + length :]

    change_weights(path, rewrite)


def replace_bytes(path: Path, old: bytes, new: bytes, count: int = 1) -> None:
    """Replaces the first `count` occurrences of `old` in the file, and nothing else."""
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, count))


def patch(path: Path, offset: int, new: bytes) -> None:
    """Overwrites the bytes at `offset`; a negative offset counts from the end."""
    data = bytearray(path.read_bytes())
    offset %= len(data)
    data[offset : offset + len(new)] = new
    path.write_bytes(bytes(data))
