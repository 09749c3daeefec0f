"""Reading a PEF: everything is checked before anything is used, and refused by the rule that it breaks."""

import os
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from sambasim.errors import InvariantError, OptionError, PefError
from sambasim.ir.verify import verify
from sambasim.pef.archive import (
    CONTENT,
    FORMAT,
    LAYOUT,
    PROGRAM,
    SCHEMA,
    VERSION,
    Archive,
    open_pef,
    refusal,
)
from sambasim.pef.document import FORMAT_NAME, FORMAT_VERSION, WRITER, PefDocument, PefHeader, parse_manifest
from sambasim.pef.weights import Layout, header_fault, map_tensors, weights_layout

if TYPE_CHECKING:
    import torch

FILE_NAME = re.compile(r"[^/\\\x00-\x1f\x7f-\x9f\u2028\u2029]{1,255}")
"""What the name of a program may be: files are called by it."""

_SUFFIX = ".pef"
_OF_CHECKPOINTS = "checkpoint.json"
_MOST_SUGGESTIONS = 5


class _Lenient(BaseModel):
    """A few keys of a part of the manifest."""

    model_config = ConfigDict(strict=True)


class _Axis(_Lenient):
    size: int


class _ProgramHead(_Lenient):
    name: str
    batch_size: int
    training: _Lenient | None
    data_parallel: _Lenient | None
    mesh: list[_Axis]


class _Head(_Lenient):
    format: str = ""
    version: str = ""
    writer: str = ""


class _ManifestHead(_Lenient):
    format: Literal["sambasim-pef"]
    version: Literal["2"]
    writer: str
    program: _ProgramHead
    compile_options: dict[str, JsonValue]
    metadata: dict[str, JsonValue]


_Parsed = TypeVar("_Parsed")


def peek(path: Path) -> PefHeader:
    """What decides whether a job can start. Quick: the program is not checked.

    Raises PefError if `path` is no PEF, or one that this sambasim cannot read.
    """
    with open_pef(path) as archive:
        head = _parse(_ManifestHead.model_validate_json, archive, path)
        digest = archive.digest
    _check_name(head.program.name, path)
    return PefHeader(
        name=head.program.name,
        batch_size=head.program.batch_size,
        world_size=prod(axis.size for axis in head.program.mesh),
        data_parallel=head.program.data_parallel is not None,
        training=head.program.training is not None,
        digest=digest,
        version=head.version,
        writer=head.writer,
        compile_options=head.compile_options,
        metadata=head.metadata,
    )


def read(path: Path) -> PefDocument:
    """Everything but the content of the weights, fully checked. Needs no torch. Raises PefError."""
    with open_pef(path) as archive:
        return _read(archive, path)[0]


def map_weights(path: Path, *, check: bool = True) -> "dict[str, torch.Tensor]":
    """The weights, by symbol name, as CPU tensors that share the file's pages.

    Writing to them does not change the file. Their types and places are checked against the symbols, and so is every
    byte of them against the digest, as a damaged model would train without a word. `check=False` leaves the bytes
    unread, for who has checked them already. Raises PefError.
    """
    with open_pef(path) as archive:
        document, layout = _read(archive, path)
        if check:
            _check_content(archive, document, path)
        return map_tensors(archive.file, archive.weights_offset + len(layout.header), layout)


def check(path: Path) -> PefDocument:
    """Everything, every byte of the weights included. Raises PefError."""
    with open_pef(path) as archive:
        document, _ = _read(archive, path)
        _check_content(archive, document, path)
    return document


def _read(archive: Archive, path: Path) -> tuple[PefDocument, Layout]:
    manifest = _parse(parse_manifest, archive, path)
    _check_name(manifest.program.name, path)
    try:
        verify(manifest.program)
    except InvariantError as error:
        raise refusal(path, PROGRAM, error.what) from error
    layout = weights_layout(manifest.program.symbols.values())
    archive.file.seek(archive.weights_offset)
    found = archive.file.read(min(len(layout.header), archive.weights_bytes))
    if fault := header_fault(found, layout):
        raise refusal(path, LAYOUT, fault)
    if layout.size_bytes != archive.weights_bytes:
        what = f"it has {archive.weights_bytes} bytes, and header and tensors take {layout.size_bytes}"
        raise refusal(path, LAYOUT, what)
    return manifest.document(archive.digest), layout


def _check_version(archive: Archive, path: Path) -> None:
    """Raises PefError for what is no PEF, and for a PEF of another version."""
    try:
        head = _Head.model_validate_json(archive.manifest)
    except ValidationError as error:
        raise _misfit(error, path) from error
    if head.format != FORMAT_NAME:
        remedy = "name a file that sambasim compile wrote"
        raise refusal(path, FORMAT, f'its key "format" is not "{FORMAT_NAME}", so this is no PEF', remedy=remedy)
    if head.version != FORMAT_VERSION:
        version, writer = (ascii(text)[1:-1][:40] for text in (head.version, head.writer))
        what = f"it is a PEF of format {version}, written by {writer}; {WRITER} reads format {FORMAT_VERSION}"
        raise refusal(path, VERSION, what)


def _check_name(name: str, path: Path) -> None:
    if not FILE_NAME.fullmatch(name):
        raise refusal(path, SCHEMA, "program.name: it cannot be the name of a file")


def _parse(parse: Callable[[bytes], _Parsed], archive: Archive, path: Path) -> _Parsed:
    try:
        return parse(archive.manifest)
    except ValidationError as error:
        _check_version(archive, path)
        raise _misfit(error, path) from error


def _misfit(error: ValidationError, path: Path) -> PefError:
    fault = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(map(str, fault["loc"]))
    return refusal(path, SCHEMA, f"{where or 'the whole'}: {fault['msg']}")


def _check_content(archive: Archive, document: PefDocument, path: Path) -> None:
    """Reads every byte of the weights: about a second for each gigabyte."""
    found = archive.weights_sha256()
    if found != document.weights_sha256:
        raise refusal(path, CONTENT, f"its sha256 is {found}, and {document.weights_sha256} was written")


def locate(pef: str, output_folder: Path = Path("out"), *, compiling: str | None = None) -> Path:
    """The file that `--pef PEF` means: a path, or NAME for OUTPUT_FOLDER/NAME/NAME.pef, where compile writes.

    compiling: what makes the one that is missing, if the caller knows

    Raises OptionError, which lists the places that were searched, and the PEFs that exist.
    """
    candidates = [Path(pef)]
    name = pef.removesuffix(_SUFFIX)
    if name and name == Path(name).name:
        candidates.append(output_folder / name / f"{name}{_SUFFIX}")
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if os.path.isfile(candidates[0] / _OF_CHECKPOINTS):  # Path's raises where nobody may look
        raise OptionError(
            f"{pef} is a checkpoint, and no PEF",
            remedy=f"--pef NAME --resume {pef} to train on from it; sambasim compare {pef} OTHER tells two apart",
        )
    missing = [f"{path} ({'a folder' if path.is_dir() else 'not there'})" for path in candidates]
    raise OptionError(
        f"there is no PEF {pef!r}",
        where=f"looked for {', then '.join(missing)}, from {Path.cwd()}",
        remedy=_suggestion(output_folder, compiling),
    )


def _suggestion(output_folder: Path, compiling: str | None) -> str:
    names = sorted(path.stem for path in output_folder.glob(f"*/*{_SUFFIX}") if path.stem == path.parent.name)
    if not names:
        return f"compile it first: {compiling or 'sambasim compile'}"
    more = f" and {len(names) - _MOST_SUGGESTIONS} more" if len(names) > _MOST_SUGGESTIONS else ""
    or_compile = f"; or compile it: {compiling}" if compiling is not None else ""
    return f"one of those in {output_folder}: {', '.join(names[:_MOST_SUGGESTIONS])}{more}{or_compile}"
