"""Writing a PEF: all of it, or nothing.

The weights are hashed while they are written, once. Their digest stands in the manifest, which stands before them; but
the manifest's size does not depend on digests, so it is written last, into the place that was left for it.
"""

import hashlib
import os
import secrets
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from pydantic import ValidationError

from sambasim.errors import InternalError, MachineError, UserError
from sambasim.ir.verify import verify
from sambasim.pef.archive import Frame, Member, manifest_local_header, trailer, weights_local_header
from sambasim.pef.canonical import canonical_json, check_json_object, manifest_digest
from sambasim.pef.document import PefDocument
from sambasim.pef.encode import encode
from sambasim.pef.frame import LARGEST_MANIFEST_BYTES
from sambasim.pef.layout import Layout, weights_layout
from sambasim.pef.weights import check_tensors, tensor_bytes
from sambasim.units import MIB, format_bytes

if TYPE_CHECKING:
    import torch

_CHUNK_BYTES = 4 * MIB
"""Written, hashed and summed piece by piece, so that a piece is still in the cache for the second and third."""


def write(path: Path, document: PefDocument, weights: "Mapping[str, torch.Tensor]") -> PefDocument:
    """Writes `document` and its weights to `path`, and returns it with its digests filled in.

    `weights` maps the name of every PARAMETER, BUFFER and CONSTANT symbol to a CPU tensor of exactly its type. The file
    appears under its name when it is complete and on the disk; on any error nothing is left. Missing folders are made.

    Raises InvariantError or InternalError if program or weights are not what a PEF may hold, UserError if options or
    metadata are not JSON, and MachineError if the file cannot be written.
    """
    verify(document.program)
    layout = weights_layout(document.program.symbols.values())
    check_tensors(layout, weights)
    fields = _manifest_fields(document, layout)
    size_bytes = len(canonical_json(fields))
    if size_bytes > LARGEST_MANIFEST_BYTES:
        limit = format_bytes(LARGEST_MANIFEST_BYTES)
        what = f"the program takes {format_bytes(size_bytes)} of JSON, and a PEF holds at most {limit}"
        raise UserError(what, remedy="compile a smaller model, or one with fewer unrolled steps")

    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # "x" and not mkstemp, whose files other users could not read.
            with temporary.open("xb") as file:
                written = _write_archive(file, fields, layout, weights)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)
    except OSError as error:
        what = f"cannot write {path}: {error.strerror or error}"
        needed = format_bytes(layout.size_bytes + size_bytes)
        remedy = f"make room for {needed}, or choose another folder with --output-folder"
        raise MachineError(what, where=str(path.parent), remedy=remedy) from error
    digest, weights_sha256 = written
    return replace(document, digest=digest, weights_sha256=weights_sha256)


def _manifest_fields(document: PefDocument, layout: Layout) -> dict[str, object]:
    """The manifest as JSON values, with zeros for the digests. Checks that all of it can be said."""
    try:
        for name in ("data_source", "compile_options", "training_defaults"):
            check_json_object(name, getattr(document, name))
        manifest = encode(replace(document, digest="", weights_sha256=""), layout.size_bytes)
        fields = manifest.model_dump()
        canonical_json(fields)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise InternalError(f"a PEF cannot say {where}: {fault['msg']}", where=where) from error
    except UnicodeEncodeError as error:
        around = ascii(error.object[max(0, error.start - 30) : error.start + 10])
        what = f"a name or a path that goes into the PEF is not Unicode: {around}"
        raise UserError(what, remedy="rename the file or the folder") from error
    except (TypeError, ValueError) as error:
        what = f"the options, the metadata or a name cannot be written as JSON: {error}"
        raise UserError(what, remedy="use text, finite numbers, lists and tables only") from error
    return fields


def _write_archive(
    file: BinaryIO, fields: dict[str, object], layout: Layout, weights: "Mapping[str, torch.Tensor]"
) -> tuple[str, str]:
    """Writes the archive to an empty file; returns its digest and that of the weights."""
    size_bytes = len(canonical_json(fields))
    place = Frame(Member(size_bytes, 0), Member(layout.size_bytes, 0))
    file.seek(place.weights_offset)
    hashed, crc32 = hashlib.sha256(), 0
    with ThreadPoolExecutor(1) as other:  # hashing takes as long as the writing and the sum, and none holds the GIL
        for piece in chain([memoryview(layout.header)], tensor_bytes(layout, weights)):
            for start in range(0, len(piece), _CHUNK_BYTES):
                chunk = piece[start : start + _CHUNK_BYTES]
                hashing = other.submit(hashed.update, chunk)
                file.write(chunk)
                crc32 = zlib.crc32(chunk, crc32)
                hashing.result()
    filled = fields | {"weights": {"sha256": hashed.hexdigest(), "size_bytes": layout.size_bytes}}
    filled["digest"] = manifest_digest(filled)
    manifest = canonical_json(filled)
    if len(manifest) != size_bytes:
        raise InternalError(f"the manifest takes {len(manifest)} bytes, and {size_bytes} were left for it")
    frame = Frame(Member(size_bytes, zlib.crc32(manifest)), Member(layout.size_bytes, crc32))
    file.write(trailer(frame))
    file.seek(0)
    file.write(manifest_local_header(frame) + manifest + weights_local_header(frame))
    return str(filled["digest"]), hashed.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Puts the new name on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
