"""The folder of a run's checkpoints: names, and the lock that gives it to one run at a time.

step-0000000050/            a complete checkpoint
best                        a link to that of the best evaluation, which is not deleted
.step-0000000060.…/         a checkpoint that is being written (see `files.py`) or deleted
damaged-step-0000000070/    a checkpoint that `--resume auto` found damaged
.lock                       locked by the run that writes here
"""

import os
import re
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import BinaryIO

from sambasim.errors import MachineError, OptionError, failing_with
from sambasim.files import claimed, regular, to_disk
from sambasim.runtime.machine.communicator import Communicator

_SHOWN_AFTER_S = 2.0
MANIFEST_FILE = "checkpoint.json"
LOCK_FILE = ".lock"


def name_of(step: int) -> str:
    return f"step-{step:010}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, judged by name only, newest first. Raises OptionError if it cannot be read."""
    with failing_with(OptionError, f"{folder} cannot be read", "check its permissions"):
        paths = folder.iterdir() if folder.is_dir() else ()
        return sorted((at for at in paths if re.fullmatch(r"step-[0-9]{10,}", at.name)), key=step_of, reverse=True)


def damaged_in(folder: Path) -> Sequence[Path]:
    return sorted(folder.glob("damaged-step-*")) if folder.is_dir() else ()


def mark_best(path: Path) -> None:
    """Make `path` the checkpoint that the link `best` names, where there are links: its manifest says it, too."""
    with suppress(OSError):
        link = path.with_name(".best")
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        link.replace(path.with_name("best"))


def remove(path: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that an interrupted deletion leaves no incomplete checkpoint."""
    shutil.rmtree(path.rename(path.with_name(f".{path.name}.deleted")))


def put_aside(path: Path) -> Path:
    """Rename a damaged checkpoint to `damaged-…`; returns its new path."""
    names = (f"damaged-{path.name}{suffix}" for suffix in chain([""], (f"-{number}" for number in count(2))))
    return path.rename(next(path.with_name(name) for name in names if not path.with_name(name).exists()))


def claim(folder: Path, communicator: Communicator) -> BinaryIO | None:
    """Collective. Create `folder`, lock it for this run and clean it up. Rank 0 gets the lock file, to close. Raises
    OptionError if another run holds the lock, MachineError if it cannot be created."""
    with communicator.alike():
        lock = _create_and_lock(folder) if communicator.rank == 0 else None
    check_shared(folder, "--checkpoint-dir", communicator)
    return lock


def check_shared(folder: Path, flag: str, communicator: Communicator) -> None:
    """Collective. Raises OptionError if a host has another `folder` than rank 0: one without the file that rank 0 makes
    there."""
    if communicator.node_count == 1:
        return
    mark = folder / f".shared-{os.urandom(8).hex()}"

    def make() -> tuple[str, str]:
        with failing_with(MachineError, f"no file can be written into {folder}", f"another place: {flag} DIR"):
            mark.touch(exist_ok=False)
        return mark.name, communicator.host_name

    name, first_host = communicator.from_first(make)
    try:
        with communicator.alike():
            if communicator.local_rank == 0 and not _appears(folder, name):
                what = f"{flag} {folder} is another folder on {communicator.host_name} than on {first_host}"
                raise OptionError(what, remedy=f"{flag} DIR, a folder that all hosts share, such as on NFS")
    finally:
        mark.unlink(missing_ok=True)


def _appears(folder: Path, name: str) -> bool:
    """Whether `folder` has a file that is there on another host. Network file systems may show it late."""
    until = time.monotonic() + _SHOWN_AFTER_S
    while True:
        with suppress(OSError):
            if name in os.listdir(folder):  # which asks the server, other than looking for one name
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.05)


def _create_and_lock(folder: Path) -> BinaryIO:
    absolute = Path(os.path.abspath(folder))
    created = [place for place in (absolute, *absolute.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(regular(folder / LOCK_FILE, os.O_WRONLY | os.O_CREAT), "wb")
        if not claimed(lock):
            lock.close()
            what = f"another run is writing its checkpoints into {folder}"
            raise OptionError(what, remedy="name another --checkpoint-dir, or wait for that run to end")
        for place in created:  # a checkpoint survives a power cut only if the folders above it do
            to_disk(place.parent)
    except OSError as error:
        what, where = f"no checkpoint can be written into {folder}: {error.strerror}", str(error.filename or folder)
        raise MachineError(what, where=where, remedy="another place: --checkpoint-dir DIR") from error
    for hidden in folder.glob(".step-*"):  # of a run that died while it wrote or deleted a checkpoint
        shutil.rmtree(hidden, ignore_errors=True)
    return lock
