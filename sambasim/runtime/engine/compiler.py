"""The C++ compiler that inductor calls, and the folder where what it built is kept."""

import hashlib
import os
import shutil
from pathlib import Path

import torch

from sambasim.errors import MachineError

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

    It is built for the processor that compiles, so processors of different kinds which share a home do not share it.
    Where the folder cannot be made, torch uses one in /tmp.
    """
    if os.environ.get(CACHE_VARIABLE):
        return
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "sambasim" / "inductor" / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        os.environ[CACHE_VARIABLE] = str(folder)


def _processor() -> str:
    """A short name for this kind of processor: what it can do decides what is built."""
    able = torch.backends.cpu.get_cpu_capability()
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    told = sorted(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    return hashlib.blake2b("\n".join([able, *told]).encode(), digest_size=8).hexdigest()
