"""Digests of the source files of a model, in its PEF: a run sees that they have changed since."""

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from types import CodeType

from sambasim.ir.program import Program
from sambasim.pef.document import PefDocument

SOURCES = "sources"
"""The metadata with the digests: JSON, by file as in the source lines of the graphs."""

_MOST_BYTES = 4 << 20
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def record(program: Program, more: Iterable[str], target: str) -> str:
    """The digests of all files that the graphs of `program` were captured from, and of `more`. `target` names the
    model."""
    lines = (node.source for graph in program.graphs for node in graph.nodes)
    files = sorted({line.file for line in lines if line is not None} | set(more))
    digests = {file: _digest(path) for file in files if (path := _find(file, target)) is not None}
    return json.dumps({"python": _PYTHON, **{file: digest for file, digest in digests.items() if digest}})


def changed(document: PefDocument) -> Iterator[str]:
    """A notice for each file that is no longer what it was at compile time. Nothing for files that are not here, and
    for a PEF that another Python compiled."""
    try:
        digests = json.loads(document.metadata.get(SOURCES, "{}"))
    except ValueError:
        return
    if not isinstance(digests, dict) or digests.pop("python", None) != _PYTHON:
        return
    model = document.compile_options.get("model")
    target = str(model.get("target")) if isinstance(model, dict) else ""
    for file, digest in digests.items():
        path = _find(file, target)
        now = None if path is None else _digest(path)
        if now is not None and now != digest:
            yield f"{path} has changed since the PEF was compiled: compile it again to run the model as it is now"


def _find(file: str, target: str) -> Path | None:
    """Where Python would import `file` from: first from the folder of the model's file, last from `sys.path`."""
    module = target.rpartition(":")[0]  # package.module:name or path/file.py:name
    beside = [str(Path(module).expanduser().parent)] if module.endswith(".py") else []
    if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
        return None  # a PEF may come from anyone: no path outside of these folders
    for folder in (*beside, os.getcwd(), *sys.path):
        path = Path(folder or ".", file)
        if path.is_file():
            return path
    return None


def _digest(path: Path) -> str | None:
    """Equal for files that this version of Python runs alike, whatever their comments and layout."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            code = compile(path.read_bytes(), "", "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return code_digest(code)


def code_digest(code: CodeType) -> str:
    """Equal for functions that Python runs alike, whatever their lines, comments and names of variables."""
    constants = [_constant_text(constant) for constant in code.co_consts]
    taken = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    facts = code.co_name, code.co_code, constants, code.co_names, taken, arguments
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _constant_text(constant: object) -> str:
    if isinstance(constant, CodeType):
        return code_digest(constant)
    if isinstance(constant, frozenset):
        return f"{sorted(map(repr, constant))}"
    if isinstance(constant, tuple):
        return f"{[_constant_text(one) for one in constant]}"
    return repr(constant)
