"""Finding, reading and writing a PEF. A reader checks everything before it uses anything, and names the rule that is
broken; a writer writes all of it, or nothing. Of the PEFs that this account compiled there is a record, an empty file
`${XDG_STATE_HOME:-~/.local/state}/sambasim/compiled-pefs/DIGEST` for each; it covers no code and data that they name.
"""

import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from pydantic_core import PydanticSerializationError

from sambasim.errors import InternalError, MachineError, OptionError, UserError, failing_with
from sambasim.files import Misfit, OtherFormat, OtherVersion, parse_file, replacing
from sambasim.ir.verify import verify
from sambasim.pef.archive import (
    LARGEST_MANIFEST_BYTES,
    NOT_OURS,
    WEIGHTS,
    Archive,
    Layout,
    Rule,
    bytes_of,
    check_tensors,
    map_tensors,
    open_pef,
    refusal,
    replace_manifest,
    weights_layout,
    write_archive,
)
from sambasim.pef.document import (
    FORMAT,
    VERSION,
    WRITER,
    Checked,
    Compiled,
    PefDocument,
    PefGraph,
    manifest_json,
    parse,
)
from sambasim.units import first_of, format_bytes

if TYPE_CHECKING:
    import torch

_FILE_NAME = re.compile(r"[^/\\\x00-\x1f\x7f-\x9f\u2028\u2029]{1,255}")
"""What the name of a program may be: files are called by it."""


def digest_of(path: Path) -> str:
    """The digest of the PEF at `path`, of which rules 1 to 6 are checked. Raises PefError."""
    with open_pef(path) as archive:
        return archive.digest


def read(path: Path) -> PefDocument:
    """Everything but the content of the weights, checked unless this account and version wrote it, by the record. Needs
    no torch. Raises PefError."""
    with open_pef(path) as archive:
        return _read(archive, path)


def map_weights(path: Path, document: PefDocument | None = None, *, check: bool = True) -> "dict[str, torch.Tensor]":
    """The weights, by symbol name, as CPU tensors that share the file's pages; writing to them does not change the
    file. `document`: what `read` has returned; `check=False` is for a caller that has checked the bytes already. Raises
    PefError."""
    with open_pef(path) as archive:
        document = document or _read(archive, path)
        if document.digest != archive.digest:
            raise refusal(path, Rule.CONTENT, "it was replaced since it was read", remedy="start again")
        layout = _layout(archive, document, path)
        if check:
            _check_content(archive, document, path)
        return map_tensors(archive.file, archive.weights_offset + len(layout.header), layout)


def check(path: Path) -> PefDocument:
    """Everything, every byte of the weights included, whoever wrote it. Raises PefError."""
    with open_pef(path) as archive:
        document = _read(archive, path, is_own=False)
        _check_content(archive, document, path)
    return document


def _read(archive: Archive, path: Path, *, is_own: bool | None = None) -> PefDocument:
    """`is_own`: whether this account compiled it, by default what the record says."""
    digest = archive.digest
    try:
        document = replace(
            _parsed(archive.manifest, is_compiled_here(digest) if is_own is None else is_own), digest=digest
        )
    except OtherFormat as error:
        raise refusal(path, Rule.FORMAT, f"{error}, so this is no PEF", remedy=NOT_OURS) from None
    except OtherVersion as error:
        what = f"it is a PEF of {error}; {WRITER} reads format {VERSION}"
        raise refusal(path, Rule.VERSION, what) from None
    except Misfit as error:
        raise refusal(path, Rule.SCHEMA, str(error)) from error
    except InternalError as error:
        raise refusal(path, Rule.PROGRAM, error.what) from error
    _layout(archive, document, path)
    return document


@lru_cache(maxsize=1)  # a run reads its PEF when it checks it, and when it starts
def _parsed(manifest: bytes, is_own: bool) -> PefDocument:
    document = parse_file(manifest, parse, FORMAT, VERSION, is_known=is_own)
    if is_own and document.writer == WRITER:  # this version has checked the rest as it wrote it
        return document
    if not _FILE_NAME.fullmatch(document.program.name):
        raise Misfit("program.name: it cannot be the name of a file")
    if not document.has_several and document.program.name not in document.graphs:
        raise Misfit("graphs: a graph alone is called as its program")
    _verify(document)
    return document


def _verify(document: PefDocument) -> None:
    """Raises InternalError for a wrong program, and for graphs that disagree about a weight."""
    for name, graph in document.graphs.items():
        verify(graph.program)
        if unknown := set(graph.own).difference(graph.program.names_of(*WEIGHTS)):
            raise InternalError(f"the graph {name} has no weight {min(unknown)}, which it is to have of its own")
    if document.first.own:
        raise InternalError("the first graph has no weights of its own: those of others differ from its")
    _ = document.stored


def _layout(archive: Archive, document: PefDocument, path: Path) -> Layout:
    layout = weights_layout(document.stored.values())
    archive.file.seek(archive.weights_offset)
    if archive.file.read(min(len(layout.header), archive.weights_bytes)) != layout.header:
        raise refusal(path, Rule.LAYOUT, "its header is not the one that belongs to the symbols")
    if layout.size_bytes != archive.weights_bytes:
        what = f"it has {archive.weights_bytes} bytes, and header and tensors take {layout.size_bytes}"
        raise refusal(path, Rule.LAYOUT, what)
    return layout


def _check_content(archive: Archive, document: PefDocument, path: Path) -> None:
    """Takes about a second for each gigabyte."""
    if (found := archive.weights_sha256()) != document.weights_sha256:
        raise refusal(path, Rule.CONTENT, f"its sha256 is {found}, and {document.weights_sha256} was written")


def write(path: Path, document: PefDocument, weights: "Mapping[str, torch.Tensor]") -> PefDocument:
    """Writes `document` and its weights (by the names of `document.stored`) to `path`; returns it with its digests.
    The file appears when it is complete; on an error nothing is left. Raises InternalError for a wrong program or
    weights, UserError for what is not JSON, MachineError if the file cannot be written."""
    _verify(document)
    layout = weights_layout(document.stored.values())
    check_tensors(layout, weights)
    size_bytes = len(_json(document, "0" * 64))
    if size_bytes > LARGEST_MANIFEST_BYTES:
        limit = format_bytes(LARGEST_MANIFEST_BYTES)
        what = f"the program takes {format_bytes(size_bytes)} of JSON, and a PEF holds at most {limit}"
        raise UserError(what, remedy="compile a smaller model, or one with fewer unrolled steps")

    remedy = f"free {format_bytes(layout.size_bytes + size_bytes)}, or choose another folder with --output-folder"
    with writing(path, remedy), replacing(path) as hidden, hidden.open("xb") as file:
        tensors = (bytes_of(weights[symbol.name]) for symbol, _ in layout.places)
        pieces = chain([memoryview(layout.header)], tensors)
        digest, weights_sha256 = write_archive(file, pieces, layout.size_bytes, partial(_json, document))
    return replace(document, digest=digest, weights_sha256=weights_sha256)


def join(path: Path, graphs: Mapping[str, Path]) -> PefDocument:
    """Writes a PEF of several graphs to `path`, from a PEF of each, by name. Equal weights are stored once. Raises as
    `write`."""
    joined: dict[str, PefGraph] = {}
    weights: dict[str, torch.Tensor] = {}
    documents = {name: read(part) for name, part in graphs.items()}
    for name, document in documents.items():
        tensors = map_weights(graphs[name], document)
        own = [key for key, tensor in tensors.items() if key in weights and not _is_equal(weights[key], tensor)]
        weights |= {f"{name}/{key}" if key in own else key: tensor for key, tensor in tensors.items()}
        joined[name] = replace(document.first, own=tuple(own))
    first, *_ = documents.values()
    return write(path, replace(first, graphs=joined), weights)


def compile_several(path: Path, works: Mapping[str, Callable[[Path], Compiled]]) -> dict[str, Compiled]:
    """Writes a PEF of several graphs to `path`: each of `works`, by name, compiles one in a folder. Returns what they
    gave, with that path."""
    folder = path.parents[1]
    folder.mkdir(parents=True, exist_ok=True)
    done: dict[str, Compiled] = {}
    with TemporaryDirectory(prefix=f".{path.stem}.", dir=folder) as parts:
        for name, work in works.items():
            done[name] = work(Path(parts, str(len(done))))
        digest = join(path, {name: one.path for name, one in done.items()}).digest
    told = record_compiled(digest)
    return {name: replace(one, path=path, digest=digest, notices=(*one.notices, *told)) for name, one in done.items()}


def _is_equal(tensor: "torch.Tensor", other: "torch.Tensor") -> bool:
    return (tensor.dtype, tensor.shape) == (other.dtype, other.shape) and bytes_of(tensor) == bytes_of(other)


def seal(path: Path, checked: Checked | None) -> str:
    """Add to the PEF at `path`, which nobody else knows, how it was `checked`. Returns its digest."""
    with open_pef(path) as archive:
        document = _read(archive, path)
    graphs = {name: replace(graph, checked=checked) for name, graph in document.graphs.items()}
    with path.open("r+b") as file:
        return replace_manifest(file, manifest_json(replace(document, graphs=graphs)))


def writing(path: Path, remedy: str) -> AbstractContextManager[None]:
    """Raises MachineError for an OSError within."""
    return failing_with(MachineError, f"cannot write {path}", remedy, str(path.parent))


def _json(document: PefDocument, weights_sha256: str) -> bytes:
    """The manifest. Raises UserError for what cannot be written as JSON."""
    if not _FILE_NAME.fullmatch(document.program.name):
        raise InternalError(f"{document.program.name!r} cannot be the name of a program: it is no name of a file")
    try:
        return manifest_json(replace(document, weights_sha256=weights_sha256))
    except PydanticSerializationError as error:
        if "surrogates" in str(error):
            what = f"a name or a path that goes into the PEF is not Unicode: {str(error)!a}"
            raise UserError(what, remedy="rename the file or the folder") from error
        what = f"the options or the metadata cannot be written as JSON: {str(error).rpartition(': ')[2]}"
        raise UserError(what, remedy="use text, finite numbers, lists and tables only") from error


_MOST_SUGGESTIONS = 5
_WRITABLE_BY_OTHERS = 0o022


def locate(pef: str, output_folder: Path = Path("out"), *, compiling: str | None = None) -> Path:
    """The file that `--pef PEF` means: a path, or NAME for OUTPUT_FOLDER/NAME/NAME.pef. `compiling` is the command that
    makes it, if the caller knows. Raises OptionError, which lists the places searched, and the PEFs that exist."""
    candidates = [Path(pef)]
    if (name := pef.removesuffix(".pef")) and name == Path(name).name:
        candidates.append(output_folder / name / f"{name}.pef")
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    if os.path.isfile(candidates[0] / "checkpoint.json"):  # Path.is_file raises in a closed folder
        remedy = f"--pef NAME --resume {pef} to train on from it; sambasim compare {pef} OTHER tells two apart"
        raise OptionError(f"{pef} is a checkpoint, and no PEF", remedy=remedy)
    names = sorted(path.stem for path in output_folder.glob("*/*.pef") if path.stem == path.parent.name)
    or_compile = f"; or compile it: {compiling}" if compiling is not None else ""
    remedy = f"one of those in {output_folder}: {first_of(names, _MOST_SUGGESTIONS)}{or_compile}"
    if not names:
        remedy = f"compile it first: {compiling or 'sambasim compile'}"
    missing = [f"{path} ({'a folder' if path.is_dir() else 'not there'})" for path in candidates]
    where = f"searched {', then '.join(missing)}, from {Path.cwd()}"
    raise OptionError(f"there is no PEF {pef!r}", where=where, remedy=remedy)


def record_compiled(digest: str) -> list[str]:
    """Record that this account compiled the PEF with this digest. Returns a notice if that fails."""
    try:
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / digest).touch(mode=0o600)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        return [f"cannot record that this account compiled the PEF ({why}): `sambasim run` will ask for --trust"]
    return []


def is_compiled_here(digest: str) -> bool:
    with suppress(OSError, RuntimeError):
        folder = _folder()
        for path in (folder, folder / digest):
            status = path.lstat()
            # What another account could have written proves nothing.
            if status.st_uid != os.getuid() or status.st_mode & _WRITABLE_BY_OTHERS:
                return False
        return re.fullmatch("[0-9a-f]{64}", digest) is not None
    return False


def _folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME")
    return Path(state or Path.home() / ".local" / "state") / "sambasim" / "compiled-pefs"
