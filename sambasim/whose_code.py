"""Whose code a file is: Python's own, torch's, another installed package's, sambasim's or the user's."""

import os
import sys
import sysconfig
from functools import cache
from importlib.util import find_spec
from pathlib import Path

PACKAGE = f"{Path(__file__).parent}{os.sep}"
_QUICK_START = f"{PACKAGE}quickstart{os.sep}"
_PYTHON = (*(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib")), "<")
_LAUNCHER = str(Path(sys.executable).with_name("sambasim"))


@cache
def torch_folder() -> str:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return f"{Path(spec.origin).parent}{os.sep}"


def is_ours(file: str) -> bool:
    """Whether `file` is one of sambasim's. Models of the quick start are a user's."""
    return file.startswith(PACKAGE) and not file.startswith(_QUICK_START)


@cache
def is_package_file(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


@cache
def is_library_file(file: str) -> bool:
    """Whether `file` is one of torch, of sambasim or of Python itself."""
    of_python = file.startswith(_PYTHON) and not is_package_file(file)
    return of_python or file.startswith(torch_folder()) or is_ours(file)


@cache
def is_users_file(file: str) -> bool:
    """Whether `file` is neither installed nor one of sambasim's."""
    return not (is_library_file(file) or is_package_file(file) or file == _LAUNCHER)
