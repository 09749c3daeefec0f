"""Which engine a job runs with, and the C++ compiler that the inductor engine calls.

The job falls back to the plain engine if any rank has no compiler.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sambasim.errors import MachineError
from sambasim.runtime.kernels.build import cache_folder
from sambasim.runtime.ranks import Communicator

if TYPE_CHECKING:
    from sambasim.runtime.engine.inductor import Inductor

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


EngineName = Literal["plain", "inductor"]

EXEMPT = "--engine inductor: its bits are its own, equal over sync paths and runs"


@dataclass(frozen=True, slots=True)
class Engine:
    """What really runs. `inductor` is None for the plain engine; `notice` says why it is not the one asked for, or not
    as fast as it could be."""

    name: EngineName
    inductor: "Inductor | None" = None
    notice: str | None = None


def choose_engine(wanted: EngineName, communicator: Communicator, hear: Callable[[str], None]) -> Engine:
    """Collective. `hear` is told what the compiler is at."""
    if wanted == "plain":
        return Engine("plain")
    missing = [one for one in communicator.all_gather_object(_missing_compiler()) if one is not None]
    if missing:
        return Engine("plain", notice=f"{missing[0]}; the plain engine runs instead")

    from sambasim.runtime.engine.inductor import Compiling, Inductor  # seconds, and only for those who want it

    def progress(compiling: Compiling) -> None:
        hear(
            f"inductor: {compiling.done} of {compiling.parts} parts compiled in {compiling.elapsed_s:.0f} s (measured)"
        )

    return Engine("inductor", Inductor(progress))


def _missing_compiler() -> str | None:
    """Why this rank cannot compile, with what helps; None if it can."""
    try:
        find_compiler()
    except MachineError as error:
        return f"{error.what} ({error.remedy})"
    return None
