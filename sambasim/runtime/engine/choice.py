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
        what = f"--engine inductor needs a C++ compiler, but CXX names {name}, which does not exist"
        raise MachineError(what, remedy="unset CXX")
    raise MachineError(
        f"--engine inductor needs a C++ compiler, and there is no {name} in PATH",
        remedy="install one, on Debian and Ubuntu: apt install g++; on Fedora: dnf install gcc-c++",
    )


def use_cache_folder() -> None:
    """Store compiled code in the user's cache folder, unless TORCHINDUCTOR_CACHE_DIR names another one.

    If the folder cannot be created or written, torch uses one in /tmp.
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
    """The engine that runs. `inductor` is None for the plain engine; `notice` says why it is not the requested one."""

    name: EngineName
    inductor: "Inductor | None" = None
    notice: str | None = None


def choose_engine(wanted: EngineName, communicator: Communicator, report: Callable[[str], None]) -> Engine:
    """Collective. `report` is called with the progress of the compiler."""
    if wanted == "plain":
        return Engine("plain")
    missing = [one for one in communicator.all_gather_object(_missing_compiler()) if one is not None]
    if missing:
        return Engine("plain", notice=f"{missing[0]}; the plain engine runs instead")

    from sambasim.runtime.engine.inductor import Compiling, Inductor  # takes seconds to import

    def progress(compiling: Compiling) -> None:
        report(
            f"inductor: {compiling.done} of {compiling.parts} parts compiled in {compiling.elapsed_s:.0f} s (measured)"
        )

    return Engine("inductor", Inductor(progress))


def _missing_compiler() -> str | None:
    """Why this rank cannot compile, and the remedy; None if it can."""
    try:
        find_compiler()
    except MachineError as error:
        return f"{error.what} ({error.remedy})"
    return None
