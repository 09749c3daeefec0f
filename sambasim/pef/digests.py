"""Digests: of each part of a PEF; of a model's source files, so that a run sees that they have changed since; and of
its forward, by which a checkpoint knows the PEFs that it belongs to."""

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import CodeType
from typing import TYPE_CHECKING

from sambasim.files import once
from sambasim.ir.graph import Argument, Graph, Ref, SectionKind, leaves
from sambasim.ir.operators import OPERATORS, OperatorKind
from sambasim.ir.program import EMA_PREFIX, Program
from sambasim.ir.types import SymbolKind
from sambasim.pef.archive import bytes_of
from sambasim.pef.document import PefDocument, serializer

if TYPE_CHECKING:
    from torch import Tensor


PARTS = {
    "graph": "its graph",
    "source": "source lines of its model",
    "weights": "its initial weights",
    "data_source": "its data source",
    "compile_options": "the options it was compiled with",
    "training_defaults": "its training defaults",
    "metadata": "its metadata",
}
"""The parts of a PEF that have digests, in words."""


def part_digests(document: PefDocument) -> dict[str, str]:
    """The SHA-256 of each of `PARTS`, to find in which parts two PEFs differ. `compile_options` covers the smallest
    world size, `training_defaults` the defaults of the optimizers' arguments. `document` has been read or written, so
    that it knows the digest of its weights."""
    fields = serializer().to_python(document, mode="json")
    parts: dict[str, list[object]] = {name: [fields.get(name)] for name in PARTS}
    parts["weights"].append(fields["weights_sha256"])
    for name, graph in fields["graphs"].items():
        program = graph["program"]
        of_optimizers = (EMA_PREFIX, *(f"{optimizer['name']}__" for optimizer in program["optimizers"]))
        numbers = [one for one in program["runtime_arguments"] if one["name"].startswith(of_optimizers)]
        updates = (optimizer["update"] for optimizer in program["optimizers"])
        graphs = filter(None, (program["training"], program["evaluation"], program["single"], *updates))
        parts["source"] += [node.pop("source") for one in graphs for node in one["nodes"]]
        parts["compile_options"] += [axis.pop("size") for axis in program["mesh"]]
        parts["training_defaults"] += [[one["name"], one.pop("default")] for one in numbers]
        parts["metadata"].append(graph["metadata"])
        parts["graph"] += [name, program, graph["own"]]  # what is left of it
    return {name: _sha256(json.dumps(parts[name], sort_keys=True)) for name in PARTS}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


SOURCES = "sources"
"""The metadata with the digests: JSON, by file as in the source lines of the graphs."""

_MOST_BYTES = 4 << 20
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def record(program: Program, more: Iterable[str], target: str) -> str:
    """The digests of all files that `program` was captured from, and of `more`. `target` names the model."""
    lines = (node.source for graph in (*program.graphs, *program.updates) for node in graph.nodes)
    files = sorted({line.file for line in lines if line is not None} | set(more))
    digests = {file: _digest(path) for file in files if (path := _find(file, target)) is not None}
    return json.dumps({"python": _PYTHON} | {file: digest for file, digest in digests.items() if digest})


def changed(document: PefDocument) -> Iterator[str]:
    """A notice for each file here that is not what it was at compile time; none for a PEF of another Python."""
    digests: object = None
    with suppress(ValueError):
        digests = json.loads(document.metadata.get(SOURCES, "{}"), object_pairs_hook=once)
    if not isinstance(digests, dict) or digests.pop("python", None) != _PYTHON:
        return
    model = document.compile_options.get("model")
    target = str(model.get("target")) if isinstance(model, dict) else ""
    for file, digest in digests.items():
        path = _find(file, target)
        if path is not None and _digest(path) not in (None, digest):
            yield f"{path} has changed since the PEF was compiled: compile it again to run the model as it is now"


def _find(file: str, target: str) -> Path | None:
    """Where Python would import `file` from: first from the folder of the model's file, last from `sys.path`."""
    module = target.rpartition(":")[0]  # package.module:name or path/file.py:name
    beside = [str(Path(module).expanduser().parent)] if module.endswith(".py") else []
    if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
        return None  # a PEF may come from anyone: no path outside of these folders
    paths = (Path(folder or ".", file) for folder in (*beside, os.getcwd(), *sys.path))
    return next((path for path in paths if path.is_file()), None)


def _digest(path: Path) -> str | None:
    """Equal for files that this version of Python runs alike, whatever their comments and layout."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        with warnings.catch_warnings(action="ignore"):
            code = compile(path.read_bytes(), "", "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return code_digest(code)


def code_digest(code: CodeType) -> str:
    """Equal for functions that Python runs alike, whatever their lines, comments and names of variables."""
    constants = [_constant_text(constant) for constant in code.co_consts]
    taken = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return _sha256(repr((code.co_name, code.co_code, constants, code.co_names, taken, arguments)))


def _constant_text(constant: object) -> str:
    match constant:
        case CodeType():
            return code_digest(constant)
        case frozenset():
            return f"{sorted(map(repr, constant))}"
        case tuple():
            return f"{list(map(_constant_text, constant))}"
    return repr(constant)


_OF_SHAPES = (OperatorKind.VIEW, OperatorKind.COPY, OperatorKind.CREATION, OperatorKind.RANDOM)
_OF_COUNTS = (
    *(f"aten.div.{overload}" for overload in ("Tensor", "Scalar", "Tensor_mode", "Scalar_mode")),
    *("aten.native_group_norm.default", "aten.affine_grid_generator.default"),
)
"""Operators whose integers may be sizes of the batch: shapes, and counts of samples."""


def digests_of_model(
    captured: Program, weights: "Mapping[str, Tensor]", updates: Iterable[Graph] = ()
) -> dict[str, str]:
    """`operators_sha256`: the operators of the forward, with their modules, all arguments but integers that may be
    sizes of the batch, the constants, and the user's own `updates`; equal for every batch size. `integers_sha256`: the
    integers that are left out, which are equal for one batch size."""
    symbols = [captured.symbols[name] for name in captured.leading.inputs]
    constants = [
        (symbol.name, str(symbol.type), hashlib.sha256(bytes_of(weights[symbol.name])).hexdigest())
        for symbol in symbols
        if symbol.kind is SymbolKind.CONSTANT
    ]
    operators: list[object] = [(node.operator, node.args, node.kwargs) for one in updates for node in one.nodes]
    integers = []
    for node in captured.leading.nodes_of(SectionKind.FWD):
        arguments = (*node.args, *(value for _, value in node.kwargs))
        has_sizes = OPERATORS[node.operator].kind in _OF_SHAPES or node.operator in _OF_COUNTS
        operators.append((node.operator, node.module, _settings(arguments, has_sizes)))
        if has_sizes:
            integers.append(_settings(arguments, False))
    return {"operators_sha256": _sha256(repr((operators, constants))), "integers_sha256": _sha256(repr(integers))}


def _settings(arguments: tuple[Argument, ...], without_integers: bool) -> list[Argument]:
    """What is in `arguments` and no value."""
    settings = (argument for argument in leaves(arguments) if not isinstance(argument, Ref))
    return [setting for setting in settings if not (without_integers and type(setting) is int)]
