"""Writing a PEF: all of it, or nothing."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic_core import PydanticSerializationError

from sambasim.errors import InternalError, MachineError, UserError
from sambasim.ir.verify import verify
from sambasim.pef.archive import LARGEST_MANIFEST_BYTES, write_archive
from sambasim.pef.document import PefDocument, manifest_json
from sambasim.pef.reader import FILE_NAME
from sambasim.pef.weights import check_tensors, tensor_bytes, weights_layout
from sambasim.units import format_bytes

if TYPE_CHECKING:
    import torch

_NO_DIGEST = "0" * 64


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
    size_bytes = len(_checked_json(document))
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
                pieces = chain([memoryview(layout.header)], tensor_bytes(layout, weights))
                digest, weights_sha256 = write_archive(
                    file,
                    pieces,
                    layout.size_bytes,
                    lambda sha256: manifest_json(replace(document, weights_sha256=sha256)),
                )
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
    return replace(document, digest=digest, weights_sha256=weights_sha256)


def _checked_json(document: PefDocument) -> bytes:
    """The manifest before the weights have been hashed. Checks that all of it can be written as JSON."""
    if not FILE_NAME.fullmatch(document.program.name):
        raise InternalError(f"{document.program.name!r} cannot be the name of a program: it is no name of a file")
    try:
        return manifest_json(replace(document, weights_sha256=_NO_DIGEST))
    except TypeError as error:
        raise InternalError(f"the options or the metadata are not JSON: {error}") from error
    except (PydanticSerializationError, ValueError) as error:
        if "surrogates" in str(error):
            what = f"a name or a path that goes into the PEF is not Unicode: {str(error)!a}"
            raise UserError(what, remedy="rename the file or the folder") from error
        what = f"the options or the metadata cannot be written as JSON: {error}"
        raise UserError(what, remedy="use text, finite numbers, lists and tables only") from error


def _sync_folder(folder: Path) -> None:
    """Puts the new name on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
