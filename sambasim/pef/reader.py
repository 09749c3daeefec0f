"""Reading a PEF: everything is checked before anything is used, and refused by the rule that it breaks."""

import hashlib
import re
import zlib
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from pydantic import ValidationError

from sambasim import __version__
from sambasim.errors import InvariantError
from sambasim.ir.verify import verify
from sambasim.pef.archive import Frame
from sambasim.pef.canonical import canonical_json, manifest_digest, parse_json
from sambasim.pef.decode import ForbiddenConstantError, decode
from sambasim.pef.document import PefDocument, PefHeader
from sambasim.pef.frame import open_pef, read_manifest
from sambasim.pef.layout import Layout, header_fault, weights_layout
from sambasim.pef.manifest import FILE_NAME, FORMAT_NAME, FORMAT_VERSION, LONGEST_FILE_NAME, Manifest
from sambasim.pef.rules import (
    CANONICAL,
    CHECKSUM,
    CONSTANTS,
    CONTENT,
    DIGEST,
    FORMAT,
    JSON,
    LAYOUT,
    NODES,
    PROGRAM,
    SCHEMA,
    SIZE,
    VERSION,
    WEIGHTS_MEMBER,
    refusal,
)
from sambasim.pef.version import unread
from sambasim.pef.weights import map_tensors
from sambasim.units import MIB

if TYPE_CHECKING:
    import torch

_CHUNK_BYTES = 4 * MIB
_Kind = TypeVar("_Kind")


def peek(path: Path) -> PefHeader:
    """What decides whether a job can start. Quick: the program is not checked, and neither is the digest it states.

    Raises PefError if `path` is no PEF, or one that this sambasim cannot read.
    """
    with open_pef(path) as (file, frame):
        fields = _parse(read_manifest(file, frame, path), path)
    try:
        program = _field(fields, "program", dict)
        name = _field(program, "name", str)
        if len(name) > LONGEST_FILE_NAME or not re.fullmatch(FILE_NAME, name):
            raise ValueError("the name of its program is no name of a file")
        parallel = program.get("data_parallel") and _field(program, "data_parallel", dict)
        return PefHeader(
            name=name,
            batch_size=_field(program, "batch_size", int),
            world_size=prod(_field(axis, "size", int) for axis in _field(program, "mesh", list)),
            data_parallel=bool(parallel),
            training=bool(program.get("training")),
            digest=_field(fields, "digest", str),
            version=_field(fields, "version", str),
            writer=_field(fields, "writer", str),
            compile_options=_field(fields, "compile_options", dict),
            metadata=_field(fields, "metadata", dict),
        )
    except ValueError as error:
        raise refusal(path, SCHEMA, str(error)) from error


def read(path: Path) -> PefDocument:
    """Everything but the weights, fully checked. Needs no torch. Raises PefError."""
    with open_pef(path) as (file, frame):
        document, _ = _read_document(file, frame, path)
    return document


def map_weights(path: Path, *, check: bool = True) -> "dict[str, torch.Tensor]":
    """The weights, by symbol name, as CPU tensors that share the file's pages.

    Writing to them does not change the file. Their types and places are checked against the symbols, and so is every
    byte of them against the digest, as a damaged model would train without a word. `check=False` leaves the bytes
    unread, for who has checked them already. Raises PefError.
    """
    with open_pef(path) as (file, frame):
        document, layout = _read_document(file, frame, path)
        if check:
            _check_content(file, frame, document, path)
        return map_tensors(file, frame.weights_offset + len(layout.header), layout)


def check(path: Path) -> PefDocument:
    """Everything, every byte of the weights included. Raises PefError."""
    with open_pef(path) as (file, frame):
        document, _ = _read_document(file, frame, path)
        _check_content(file, frame, document, path)
    return document


def _field(fields: Mapping[str, object], key: str, kind: type[_Kind]) -> _Kind:
    value = fields.get(key)
    if type(value) is not kind:
        raise ValueError(f"its key {key} is not of type {kind.__name__}")
    return value


def _parse(data: bytes, path: Path) -> dict[str, object]:
    """The fields of the manifest, as far as every version of the format has them."""
    try:
        fields = parse_json(data)
    except ValueError as error:
        raise refusal(path, JSON, f"it is not strict JSON: {error}") from error
    if not isinstance(fields, dict):
        raise refusal(path, JSON, "it is not a JSON object")
    if fields.get("format") != FORMAT_NAME:
        remedy = "name a file that sambasim compile wrote"
        raise refusal(path, FORMAT, f'its key "format" is not "{FORMAT_NAME}", so this is no PEF', remedy=remedy)
    _check_version(fields, path)
    return fields


def _check_version(fields: dict[str, object], path: Path) -> None:
    fault = unread(fields, "PEF", FORMAT_VERSION)
    if fault is None:
        return
    if fault.writer is None:
        raise refusal(path, VERSION, fault.what)
    remedy = f"compile the model again with sambasim {__version__}, or run it with {fault.writer}"
    raise refusal(path, VERSION, fault.what, remedy=remedy)


def _read_document(file: BinaryIO, frame: Frame, path: Path) -> tuple[PefDocument, Layout]:
    data = read_manifest(file, frame, path)
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
    manifest = _validate(data, path)
    if manifest.weights.size_bytes != frame.weights.size_bytes:
        what = f"it has {frame.weights.size_bytes} bytes, and {manifest.weights.size_bytes} were written"
        raise refusal(path, SIZE, what)
    document = _decode(manifest, path)
    layout = weights_layout(document.program.symbols.values())
    _check_weights(file, frame, layout, path)
    return document, layout


def _validate(data: bytes, path: Path) -> Manifest:
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise refusal(path, SCHEMA, f"{where or 'the whole'}: {fault['msg']}") from error


def _decode(manifest: Manifest, path: Path) -> PefDocument:
    try:
        document = decode(manifest)
    except ForbiddenConstantError as error:
        raise refusal(path, CONSTANTS, str(error)) from error
    except ValueError as error:
        raise refusal(path, NODES, str(error)) from error
    try:
        verify(document.program)
    except InvariantError as error:
        raise refusal(path, PROGRAM, error.what) from error
    return document


def _check_weights(file: BinaryIO, frame: Frame, layout: Layout, path: Path) -> None:
    """Compares the safetensors header with the one that the symbols ask for; no more of the file is read."""
    file.seek(frame.weights_offset)
    found = file.read(min(len(layout.header), frame.weights.size_bytes))
    if fault := header_fault(found, layout):
        raise refusal(path, *fault)
    if layout.size_bytes != frame.weights.size_bytes:
        data_bytes = frame.weights.size_bytes - len(layout.header)
        raise refusal(path, LAYOUT, f"its tensors take {layout.data_bytes} bytes, and it holds {data_bytes}")


def _check_content(file: BinaryIO, frame: Frame, document: PefDocument, path: Path) -> None:
    """Reads every byte of the weights: about a second for each gigabyte."""
    sha256, crc32 = _sum_weights(file, frame)
    if sha256 != document.weights_sha256:
        what = f"its sha256 is {sha256}, and {document.weights_sha256} was written"
        raise refusal(path, CONTENT, what)
    if crc32 != frame.weights.crc32:
        raise refusal(path, CHECKSUM, "its bytes do not have the checksum of the archive", part=WEIGHTS_MEMBER)


def _sum_weights(file: BinaryIO, frame: Frame) -> tuple[str, int]:
    """SHA-256 and CRC-32 of all of weights.safetensors."""
    hashed, crc32 = hashlib.sha256(), 0
    left = frame.weights.size_bytes
    file.seek(frame.weights_offset)
    while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
        hashed.update(chunk)
        crc32 = zlib.crc32(chunk, crc32)
        left -= len(chunk)
    return hashed.hexdigest(), crc32
