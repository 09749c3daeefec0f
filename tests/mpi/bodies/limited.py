"""Asks for a window of 256 MiB a rank where it cannot be had, for the reason that the first argument names."""

import resource
import sys
from pathlib import Path

from sambasim.errors import MachineError
from sambasim.runtime.machine.communicator import Communicator
from sambasim.runtime.machine.mpi import connect
from sambasim.units import MIB

_SIZE_BYTES = 256 * MIB


def limit_space(communicator: Communicator) -> None:
    """Rank `argv[2]` may take 200 MiB more of address space."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit(communicator, resource.RLIMIT_AS, pages * resource.getpagesize() + 200 * MIB)


def limit_files(communicator: Communicator) -> None:
    """Rank `argv[2]` may write files of 1 MiB."""
    limit(communicator, resource.RLIMIT_FSIZE, MIB)


def limit(communicator: Communicator, kind: int, value: int) -> None:
    if communicator.rank == int(sys.argv[2]):
        resource.setrlimit(kind, (value, value))


def refuse_by_mpi(communicator: Communicator) -> None:
    """MPI itself refuses, as one does that cannot share memory."""
    from mpi4py import MPI

    class Refusing(MPI.Win):
        @classmethod
        def Allocate_shared(cls, *arguments: object, **named: object) -> "Refusing":
            raise MPI.Exception(MPI.ERR_NO_MEM)

    MPI.Win = Refusing  # type: ignore[misc]


def allocated(communicator: Communicator) -> str:
    try:
        communicator.allocate_shared(_SIZE_BYTES)
    except MachineError as error:
        return str(error)
    return "allocated"


def untouched(communicator: Communicator) -> str:
    """A window that is larger than /dev/shm, of which 1 MiB a rank is touched."""
    try:
        window = communicator.allocate_shared(_SIZE_BYTES, touched=[(0, MIB)])
    except MachineError as error:
        return f"{communicator.library} refused: {error}"
    window.parts[communicator.local_rank][-MIB:] = communicator.rank + 1
    window.sync()
    communicator.node_barrier()
    window.sync()
    peer = (communicator.local_rank + 1) % communicator.local_size
    right = bool((window.parts[peer][-MIB:] == peer + 1).all()) and not window.parts[peer][:MIB].any()
    return "written and read" if right else "wrong"


def main() -> None:
    communicator = connect(sys.argv)
    limits = {"space": limit_space, "files": limit_files, "mpi": refuse_by_mpi}
    if prepare := limits.get(sys.argv[1]):
        prepare(communicator)
    said = communicator.gather_object(allocated(communicator) if prepare else untouched(communicator))
    if said is not None:
        print("\n\n".join(said))


main()
