"""What is struck: a small classifier with BatchNorm and dropout, on data that strikes from within when told to."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.faults.sweep.blows import BLOW_FILE
from tests.support.mpi import run_job

STEPS = 60
SAVE_EVERY = 7

MODEL = f'''
"""A model and its data. A thread waits for a file that names a deed, and does it at whatever moment that is."""

import ctypes
import os
import threading
import time

import torch
from torch import nn
from torch.utils.data import Dataset


class Struck(RuntimeError):
    def __str__(self):
        return "struck by the sweep"


def _wait(main):
    rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
    path = "{BLOW_FILE}" + rank
    while not os.path.exists(path):
        time.sleep(0.001)
    deed = open(path).read()
    if deed == "exit":
        os._exit(86)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Struck))


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


@dataclass(frozen=True, slots=True)
class Subject:
    """The compiled PEF, and the state that a run which nobody strikes ends with, by number of ranks."""

    pef: bytes
    state_sha256: dict[int, str]


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


def compile_subject(folder: Path) -> bytes:
    """The PEF, compiled in `folder`."""
    lay_out(folder, None)
    run_job(command(COMPILE), cwd=folder, timeout=120).check()
    return (folder / "out" / "net" / "net.pef").read_bytes()
