"""The model that is trained, the faults that are injected into a rank, and when."""

import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path

from tests.support.mpi import run_job

STEPS = 60
SAVE_EVERY = 7
FAULT_FILE = "fault-"
"""With a rank behind it: a file that tells this rank what to do to itself."""

MODEL = f'''
"""A model and its data. A thread waits for a file that names a fault, and causes it at whatever moment that is."""

import ctypes
import os
import threading
import time

import torch
from torch import nn
from torch.utils.data import Dataset


class Injected(RuntimeError):
    def __str__(self):
        return "injected by the sweep"


def _wait(main):
    rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    path = "{FAULT_FILE}" + rank
    while not os.path.exists(path):
        time.sleep(0.001)
    if open(path).read() == "exit":
        os._exit(86)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Injected))


class Samples(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.001)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(12, generator=generator), index % 5


def samples():
    threading.Thread(target=_wait, args=(threading.main_thread().ident,), daemon=True).start()
    return Samples()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 5))

    def forward(self, x):
        return self.inner(x)
'''

COMPILE = (
    "compile net.py:Net --pef-name net --data-parallel -b 4 --set data.source=net.py:samples "
    "--set loss.name=cross_entropy --set optimizer.name=adamw"
)

_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")


class Fault(StrEnum):
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


_SIGNALS = {Fault.KILL: signal.SIGKILL, Fault.TERMINATE: signal.SIGTERM, Fault.STOP: signal.SIGSTOP}


def command(words: str) -> list[str]:
    """`sambasim` with `words`, under this Python."""
    return [sys.executable, "-m", "sambasim", *shlex.split(words)]


def lay_out(folder: Path, pef: bytes | None) -> None:
    """The folder that a run is started in."""
    (folder / "net.py").write_text(MODEL)
    if pef is not None:
        path = folder / "out" / "net" / "net.pef"
        path.parent.mkdir(parents=True)
        path.write_bytes(pef)


def compile_model(folder: Path) -> bytes:
    """The PEF, compiled in `folder`."""
    folder.mkdir()
    lay_out(folder, None)
    run_job(command(COMPILE), cwd=folder, timeout=120).check()
    return (folder / "out" / "net" / "net.pef").read_bytes()


def inject(fault: Fault, rank: int, folder: Path) -> int | None:
    """Cause `fault` in `rank` of the job that runs in `folder`, or in the process without a rank. Returns its pid; None
    if there is none any more."""
    pid = min(processes(folder, rank), default=None)
    if fault in _SIGNALS:
        try:
            if pid is not None:
                os.kill(pid, _SIGNALS[fault])
        except ProcessLookupError:
            return None
        return pid
    file = folder / f"{FAULT_FILE}{rank}"
    file.with_suffix(".new").write_text("exit" if fault is Fault.EXIT else "raise")
    file.with_suffix(".new").rename(file)
    return pid


def processes(folder: Path, rank: int) -> Sequence[int]:
    """The `python -m sambasim` processes that run in `folder` as `rank`, or without a rank."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdecimal() or (entry / "cwd").resolve() != folder.resolve():
                continue
            words = (entry / "cmdline").read_bytes().split(b"\0")
            environ = dict(
                pair.split(b"=", 1) for pair in (entry / "environ").read_bytes().split(b"\0") if b"=" in pair
            )
        except OSError:
            continue
        ranks = [int(environ[key.encode()]) for key in _RANKS if key.encode() in environ]
        is_sambasim = {b"-m", b"sambasim"} <= set(words) and not words[0].endswith((b"mpirun", b"mpiexec"))
        if is_sambasim and (not ranks or ranks[0] == rank):
            found.append(int(entry.name))
    return found


def wait_for(moment: Moment, folder: Path, random: float, last_step: int, patience_s: float = 60.0) -> bool:
    """Return at `moment` of the run in `folder`; False if it does not come. `random`, 0 to 1, chooses within it."""
    until = time.monotonic() + patience_s
    if moment in (Moment.START, Moment.COMPILE):
        while not processes(folder, 0) and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(random * 4)
        return True
    step = {Moment.STEP: 1 + int(random * (last_step - 10)), Moment.CHECKPOINT: 1, Moment.END: last_step}[moment]
    metrics = folder / "metrics.jsonl"
    while not _has_step(metrics, step):
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    if moment is Moment.CHECKPOINT:
        while not _is_saving(folder / "saved"):
            if time.monotonic() > until or _has_step(metrics, last_step):
                return False
        time.sleep(random * 0.01)
    else:
        time.sleep(random * (0.05 if moment is Moment.STEP else 0.3))
    return True


def _is_saving(saved: Path) -> bool:
    return saved.is_dir() and any(name.endswith(".partial") for name in os.listdir(saved))


def _has_step(metrics: Path, step: int) -> bool:
    return metrics.exists() and f'"step":{step},' in metrics.read_text(errors="replace")
