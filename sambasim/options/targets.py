"""The grammar of targets and of data sources, checked before anything is imported.

What can be typed:

    target        package.module:name   or   path/file.py:name
    data source   a target, FILE.npz, FILE.safetensors, `synthetic`, or the name of a data set that sambasim carries
"""

import os
from enum import StrEnum
from pathlib import Path

from sambasim.options.problems import Problem, nearest, one_of, show

BUILTIN_SOURCES = {"digits": "sambasim.quickstart.digits:digits"}
"""The data sets that sambasim carries, and the function that opens each."""

SYNTHETIC = "synthetic"
DATA_SUFFIXES = (".npz", ".safetensors")


class SourceKind(StrEnum):
    """What a data source is, told from its spelling alone."""

    BUILTIN = "builtin"
    FUNCTION = "function"
    FILE = "file"
    SYNTHETIC = "synthetic"


def split_target(target: str) -> tuple[str, str]:
    """`"path/file.py:Model"` -> `("path/file.py", "Model")`; the name is empty where there is no colon."""
    module, _, name = target.rpartition(":") if ":" in target else (target, "", "")
    return module, name


def target_problem(target: str) -> Problem | None:
    """What keeps `target` from being one, or None. Says what was most likely meant."""
    module, name = split_target(target)
    what = "must be package.module:name or path/file.py:name"
    if ":" not in target and target.endswith(".py"):
        return Problem("", what, f"add the name: {target}:NAME", show(target))
    if ":" not in target and all(part.isidentifier() for part in target.split(".")) and "." in target:
        parent, _, last = target.rpartition(".")
        return Problem("", what, f"put a colon before the name: {parent}:{last}", show(target))
    if not name or not all(part.isidentifier() for part in name.split(".")):
        return Problem("", what, None, show(target))
    if module.endswith(".py") and Path(module).stem:
        return None
    if not all(part.isidentifier() for part in module.split(".")):
        guess = f"a file's name ends in .py: {module}.py:{name}" if os.sep in module else None
        return Problem("", what, guess, show(target))
    return None


def source_kind(source: str) -> SourceKind | None:
    """What `source` is, or None if it is nothing that can be opened."""
    if source == SYNTHETIC:
        return SourceKind.SYNTHETIC
    if source in BUILTIN_SOURCES:
        return SourceKind.BUILTIN
    if source.endswith(DATA_SUFFIXES):
        return SourceKind.FILE
    return SourceKind.FUNCTION if ":" in source else None


def source_problem(source: str) -> Problem | None:
    """What keeps `source` from being a data source, or None."""
    kind = source_kind(source)
    if kind is SourceKind.FUNCTION:
        return target_problem(source)
    if kind is not None:
        return None
    names = [*BUILTIN_SOURCES, SYNTHETIC]
    guess = nearest(source, names)
    return Problem(
        "",
        f"must be {one_of([*names, 'module:function', *(f'FILE{suffix}' for suffix in DATA_SUFFIXES)])}",
        f"did you mean {guess}?" if guess else None,
        show(source),
    )


def absolute_path(path: str | Path, folder: Path) -> Path:
    """`path` seen from `folder`; an absolute path and one that starts with `~` stay what they say."""
    return Path(os.path.abspath(folder / Path(path).expanduser()))


def absolute_target(target: str, folder: Path) -> str:
    """A target in a file, with the file's path seen from `folder`; a target in a module is left as it is."""
    module, name = split_target(target)
    return f"{absolute_path(module, folder)}:{name}" if name and module.endswith(".py") else target


def absolute_source(source: str, folder: Path) -> str:
    """A data source with every path in it seen from `folder`."""
    if source_kind(source) is SourceKind.FILE:
        return str(absolute_path(source, folder))
    return absolute_target(source, folder)
