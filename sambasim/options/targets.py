"""Whether there is what a target names, found without importing it: a wrong name is a cheap error, and the first."""

import importlib.util
import os
import re
from difflib import get_close_matches
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from pkgutil import iter_modules

from sambasim.options.base import Problem, did_you_mean, near_file, nearest
from sambasim.options.grammar import absolute_path, split_target

TRANSFORMERS = "transformers"
"""The package whose models are made from a config."""

_PACKAGES = (TRANSFORMERS, "torch", "torchvision", "torchaudio", "timm", "diffusers")
"""Packages of models."""

_OF_A_SLIP = 0.9
"""How alike two names of packages are if one is a slip, by difflib: many packages begin with `torch`."""

_DEFINED = re.compile(r"^(?:class|def) +(\w+)", re.MULTILINE)
_CLASS = re.compile(r"^class (\w+)\(", re.MULTILINE)


def missing(target: str) -> Problem | None:
    """Why `target` names nothing, with a remedy. None if it names something, or if only an import could tell."""
    module, name = split_target(target)
    first = name.partition(".")[0]
    if module.endswith(".py"):
        path = absolute_path(module, Path.cwd())
        return missing_file(path, "path/file.py:NAME") or _missing_in_file(path, first)
    spec = _spec(module.partition(".")[0])
    if spec is None:
        return missing_module(module.partition(".")[0], target)
    if module != TRANSFORMERS:
        return None
    folders = spec.submodule_search_locations or ()
    files = (file for folder in folders for file in Path(folder).glob("models/*/modeling_*.py"))
    classes = {name for file in files for name in _CLASS.findall(file.read_text(encoding="utf-8"))}
    if first in classes:
        return None
    remedy = did_you_mean(nearest(first, sorted(classes))) or f"check the name, or pip install -U {TRANSFORMERS}"
    return Problem("", f"{TRANSFORMERS} has no model {first}", remedy)


def missing_file(path: Path, another: str) -> Problem | None:
    """`another`: the form of another name."""
    if path.is_file():
        return None
    remedy = did_you_mean(near_file(path)) or f"check the path, or name another: {another}"
    return Problem("", f"there is no file {path}", remedy)


def _missing_in_file(path: Path, name: str) -> Problem | None:
    text = path.read_text(encoding="utf-8", errors="replace")
    if re.search(rf"\b{name}\b|import \*|__getattr__", text):
        return None
    defined = _DEFINED.findall(text)
    remedy = did_you_mean(nearest(name, defined)) or f"it has {', '.join(defined) or 'nothing of its own'}"
    return Problem("", f"{path} has no {name}", remedy)


def missing_module(module: str, target: str) -> Problem:
    """The problem of a `target` whose module, or `module` above it, cannot be imported."""
    package, name = module.partition(".")[0], split_target(target)[1]
    spec = _spec(package)
    if spec is not None:
        parent, _, last = module.rpartition(".")
        inside = [info.name for info in iter_modules(spec.submodule_search_locations or [])]
        guess = nearest(last, inside) if parent == package else None
        remedy = did_you_mean(f"{parent}.{guess}:{name}") if guess else f"check the name, or the version of {package}"
        return Problem("", f"there is no module {module}", remedy)
    if package == TRANSFORMERS:
        return Problem("", f"there is no module {package}", f"pip install {TRANSFORMERS}")
    what = f"there is no module {package}"
    here = [info.name for info in iter_modules([os.getcwd()])]
    slips = get_close_matches(package, _PACKAGES, n=1, cutoff=_OF_A_SLIP)
    guess = slips[0] if slips else nearest(package, here)
    if guess not in (None, package):
        rest = split_target(target)[0].removeprefix(package)
        return Problem("", what, did_you_mean(f"{guess}{rest}:{name}"))
    if folder := _holder_near(package):
        return Problem("", what, f"run it from the folder that holds {package}: cd {folder}")
    install = f"pip install {package}, or for a file of yours path/file.py:{name}"
    return Problem("", f"{what}: no such package is installed, and no such folder or file is near", install)


def _spec(package: str) -> ModuleSpec | None:
    """Of a package or module without dots, in this folder or installed."""
    return PathFinder.find_spec(package, [os.getcwd()]) or importlib.util.find_spec(package)


def _holder_near(package: str) -> str | None:
    """The folder above this one, or in it, that holds `package`, relative to this one."""
    here = Path.cwd()
    near = [here.parent, *sorted(folder for folder in here.iterdir() if folder.is_dir())]
    holder = next(
        (folder for folder in near if (folder / package).is_dir() or (folder / f"{package}.py").is_file()), None
    )
    return None if holder is None else os.path.relpath(holder)
