"""Which engine runs: the plain one, or torch's inductor where all ranks have a C++ compiler."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sambasim.errors import MachineError
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.kernels.build import find_cpp_compiler

if TYPE_CHECKING:
    from sambasim.runtime.engine.inductor import Inductor

EngineName = Literal["plain", "inductor"]

INDUCTOR_EXEMPT = "--engine inductor: its bits are its own, equal over sync paths and runs"


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
    missing = next(filter(None, communicator.all_gather_object(_missing_compiler())), None)
    if missing is not None:
        return Engine("plain", notice=f"{missing}; the plain engine runs instead")

    from sambasim.runtime.engine.inductor import Inductor  # takes seconds to import

    def progress(done: int, parts: int, elapsed_s: float) -> None:
        report(f"inductor: {done} of {parts} parts compiled in {elapsed_s:.0f} s (measured)")

    return Engine("inductor", Inductor(progress))


def _missing_compiler() -> str | None:
    """Why this rank cannot compile, and the remedy; None if it can."""
    try:
        find_cpp_compiler()
    except MachineError as error:
        return f"{error.what} ({error.remedy})"
    return None
