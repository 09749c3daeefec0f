"""One run at a time writes into a folder of checkpoints."""

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path

from sambasim.errors import MachineError, OptionError, UserError
from sambasim.runtime.checkpoint.folder import leftovers_in, rescue, sync_folder
from sambasim.runtime.ranks import Communicator

LOCK_FILE = ".lock"


class Claim:
    """Holds a folder for this run, until `let_go`, or the end of the process.

    By a record lock: neither does a process that was forked from this one hold it, as those that read data are, nor is
    it lost on file systems of a network.
    """

    def __init__(self, folder: Path) -> None:
        """Raises OSError, and BlockingIOError if another process holds it."""
        self._path = folder / LOCK_FILE
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            if isinstance(error, PermissionError):  # so say some systems that another one holds it
                raise BlockingIOError(error.errno, error.strerror) from error
            raise

    def holds(self) -> bool:
        """Whether the folder is still there under its name, and the lock in it: it may have been moved away or cleared,
        or its disk unmounted."""
        try:
            there, held = self._path.stat(), os.fstat(self._descriptor)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)

    def let_go(self) -> None:
        """Others may claim it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


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
            fault = _unwritable(folder, error)
    fault = communicator.broadcast_object(fault)
    if fault is not None:
        raise fault
    return held


def _claim(folder: Path) -> Claim:
    absolute = Path(os.path.abspath(folder))
    new = [place for place in (absolute, *absolute.parents) if not place.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    held = Claim(folder)
    for place in new:  # so that not even a power cut takes them away
        sync_folder(place.parent)
    rescue(folder)
    for path in leftovers_in(folder):
        with suppress(OSError):
            shutil.rmtree(path)
    return held


def _unwritable(folder: Path, error: OSError) -> MachineError:
    what = f"no checkpoint can be written into {folder}: {error.strerror}"
    return MachineError(what, where=str(error.filename or folder), remedy="another place: --checkpoint-dir DIR")
