"""The C++ compiler that inductor calls, and the folder where what it built is kept."""

import os
import shutil

from sambasim.errors import MachineError
from sambasim.runtime.kernels.build import cache_folder

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

_DEFAULT = "g++"


def find_compiler() -> str:
    """The C++ compiler that inductor will call, by path. Raises MachineError if there is none."""
    name = os.environ.get("CXX") or _DEFAULT
    found = shutil.which(name)
    if found is not None:
        return found
    if shutil.which(_DEFAULT) is not None:
        what = f"--engine inductor needs a C++ compiler, and CXX names {name}, which is not there"
        raise MachineError(what, remedy="unset CXX")
    raise MachineError(
        f"--engine inductor needs a C++ compiler, and there is no {name} on the PATH",
        remedy="install one, on Debian and Ubuntu: apt install g++; on Fedora: dnf install gcc-c++",
    )


def use_cache_folder() -> None:
    """Keep compiled code in the user's cache folder, if TORCHINDUCTOR_CACHE_DIR names no other.

    Where the folder cannot be made or written to, torch uses one in /tmp.
    """
    if os.environ.get(CACHE_VARIABLE):
        return
    folder = cache_folder("inductor")
    if folder is not None and os.access(folder, os.W_OK):
        os.environ[CACHE_VARIABLE] = str(folder)
