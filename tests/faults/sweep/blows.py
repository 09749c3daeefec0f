"""What is done to a rank, and when."""

import os
import signal
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

BLOW_FILE = "blow-"
"""With a rank behind it: a file that tells this rank what to do to itself."""

_ORPHANS_PARENT = 1

_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")


class Blow(StrEnum):
    """What happens to a rank."""

    KILL = "SIGKILL"
    TERMINATE = "SIGTERM"
    STOP = "SIGSTOP"
    EXCEPTION = "an exception"
    EXIT = "os._exit(86)"


class Moment(StrEnum):
    """When it happens."""

    COMPILE = "compile"
    START = "start"
    STEP = "mid-step"
    CHECKPOINT = "mid-checkpoint"
    END = "end"


_SIGNALS = {Blow.KILL: signal.SIGKILL, Blow.TERMINATE: signal.SIGTERM, Blow.STOP: signal.SIGSTOP}


def strike(blow: Blow, rank: int, folder: Path) -> int | None:
    """Do it to `rank` of the job that runs in `folder`, or to the process there that has no rank. Returns its pid; None
    if there is none any more."""
    pid = next(iter(processes(folder, rank)), None)
    if blow in _SIGNALS:
        if pid is None:
            return None
        try:
            os.kill(pid, _SIGNALS[blow])
        except ProcessLookupError:
            return None
        return pid
    deed = folder / f"{BLOW_FILE}{rank}"
    deed.with_suffix(".new").write_text("exit" if blow is Blow.EXIT else "raise")
    deed.with_suffix(".new").rename(deed)
    return pid


def processes(folder: Path, rank: int) -> Sequence[int]:
    """The sambasim processes that run in `folder`: that of `rank`, or the one without a rank; oldest first.

    What a rank has forked beside itself is none: it looks like its rank, and may be there for a moment longer.
    """
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if (entry / "cwd").resolve() != folder.resolve():
                continue
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environ = dict(
                pair.split(b"=", 1) for pair in (entry / "environ").read_bytes().split(b"\0") if b"=" in pair
            )
        except OSError:
            continue
        if b"sambasim" not in words or words[0].endswith((b"mpirun", b"mpiexec")):
            continue
        ranks = [int(environ[key.encode()]) for key in _RANKS if key.encode() in environ]
        if b"-m" in words and (not ranks or ranks[0] == rank):
            parents[int(entry.name)] = parent
    others = {_ORPHANS_PARENT, *parents} - {os.getpid()}
    return sorted(pid for pid, parent in parents.items() if parent not in others)


def wait_for(moment: Moment, folder: Path, random_s: float, last_step: int, patience_s: float = 60.0) -> bool:
    """Return at `moment` of the run in `folder`; False if it does not come. `random_s`, 0 to 1, chooses within it."""
    until = time.monotonic() + patience_s
    if moment in (Moment.START, Moment.COMPILE):
        while not processes(folder, 0) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(random_s * 4)
        return True
    step = {Moment.STEP: 1 + int(random_s * (last_step - 10)), Moment.CHECKPOINT: 1, Moment.END: last_step}[moment]
    metrics = folder / "metrics.jsonl"
    while not _has_step(metrics, step):
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    if moment is Moment.CHECKPOINT:
        while not _is_writing(folder / "saved"):
            if time.monotonic() > until or _has_step(metrics, last_step):
                return False
        time.sleep(random_s * 0.01)
    else:
        time.sleep(random_s * (0.05 if moment is Moment.STEP else 0.3))
    return True


def _is_writing(saved: Path) -> bool:
    return saved.is_dir() and any(name.endswith(".partial") for name in os.listdir(saved))


def _has_step(metrics: Path, step: int) -> bool:
    return metrics.exists() and f'"step":{step},' in metrics.read_text(errors="replace")
