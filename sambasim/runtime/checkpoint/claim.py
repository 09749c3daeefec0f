"""One run at a time writes into a folder of checkpoints."""

import fcntl
import os
import shutil
from pathlib import Path

from sambasim.errors import MachineError, OptionError, UserError
from sambasim.runtime.checkpoint.folder import leftovers_in
from sambasim.runtime.ranks import Communicator


class Claim:
    """Holds a folder for this run, for as long as it is there. The operating system lets go of it with the process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def claim(folder: Path, communicator: Communicator) -> Claim | None:
    """Collective. Make `folder`, claim it for this run, on rank 0, and clear away what died while it was written there.

    Raises OptionError if another run has claimed it, and MachineError if it cannot be made; on all ranks alike.
    """
    held: Claim | None = None
    fault: UserError | None = None
    if communicator.rank == 0:
        try:
            held = _claim(folder)
        except BlockingIOError:
            what = f"another run is writing its checkpoints into {folder}"
            fault = OptionError(what, remedy="name another --checkpoint-dir, or wait for that run to end")
        except OSError as error:
            what = f"no checkpoint can be written into {folder}: {error.strerror}"
            fault = MachineError(what, remedy="another place: --checkpoint-dir DIR")
    fault = communicator.broadcast_object(fault)
    if fault is not None:
        raise fault
    return held


def _claim(folder: Path) -> Claim:
    folder.mkdir(parents=True, exist_ok=True)
    held = Claim(os.open(folder, os.O_RDONLY))
    try:
        fcntl.flock(held.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return held  # a file system without locks: then nobody can say, and nothing is cleared away
    for path in leftovers_in(folder):
        shutil.rmtree(path, ignore_errors=True)
    return held
