"""Which engine a job runs with: the one that was asked for, or the plain one where a rank has no compiler. And whether
it multiplies by tiles: if every rank can, because that decides bits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sambasim.errors import MachineError
from sambasim.runtime.engine.compiler import find_compiler
from sambasim.runtime.ranks import Communicator

if TYPE_CHECKING:
    from sambasim.runtime.engine.inductor import Inductor

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
