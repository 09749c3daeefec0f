"""Build a C file of this folder, once for each kind of processor, and load it."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from sambasim.runtime.cache_folder import cache_folder

_FLAGS = (
    *("-std=c99", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared"),
    # Memory is the limit here, so that the widest loads win even where they slow the clock.
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)
_TIMEOUT_S = 60.0


def find_c_compiler() -> str | None:
    """By path: what CC names, else cc, else gcc; None where there is none."""
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc"]
    return next((found for name in names if (found := shutil.which(name))), None)


@cache
def library(name: str, *definitions: str) -> ctypes.CDLL | None:
    """What `name`.c gives with `definitions`, such as "REAL=float"; None where it cannot be built or loaded.

    A process asks the machine once; what was built before is loaded without a compiler.
    """
    source = Path(__file__).with_name(f"{name}.c")
    flags = [*_FLAGS, *(f"-D{definition}" for definition in definitions)]
    key = hashlib.blake2b("\n".join([source.read_text(), *flags]).encode(), digest_size=8).hexdigest()
    kept = cache_folder("kernels")
    try:
        if kept is None:  # a library that is loaded may be deleted
            with tempfile.TemporaryDirectory() as folder:
                return _load(source, flags, Path(folder) / f"{name}.so")
        return _load(source, flags, kept / f"{name}-{key}.so")
    except (OSError, subprocess.SubprocessError):
        return None


def _load(source: Path, flags: list[str], path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError:  # not there, or not whole
        _build(source, flags, path)
        return ctypes.CDLL(str(path))


def _build(source: Path, flags: list[str], path: Path) -> None:
    compiler = find_c_compiler()
    if compiler is None:
        raise FileNotFoundError("no C compiler")
    # Ranks that start together may all build; each moves a whole file into place, and all files are the same.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        built = Path(folder) / path.name
        command = [compiler, *flags, "-o", str(built), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S)
        built.replace(path)
