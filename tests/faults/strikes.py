"""Each signal that asks a run to stop, at each phase of a job, with and without data workers, to mpirun, to a rank and
to all processes: the run ends with its checkpoint and the signal's code, and leaves nothing.

python -m tests.faults.strikes [--rounds 2]        the whole matrix takes about eight minutes a round
python -m tests.faults.strikes --random 50         50 jobs, each struck three times at random and resumed to its end
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random
from typing import NamedTuple

import click
import pytest

from sambasim.forks import STOP_SIGNALS, children_of
from sambasim.runtime.checkpoint.content import Checkpoint
from sambasim.runtime.checkpoint.folder import checkpoints_in
from tests.faults.command import sambasim
from tests.support.mpi import (
    SAMBASIM,
    check_nothing_left,
    codes_of_signalled,
    job_environ,
    mpirun,
    processes_of,
    segment_names,
)

MODEL = """
import os, time, torch
from torch import nn

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index % 3

def samples():
    open("opening", "w").close()
    time.sleep(0.5)
    return Samples(), Samples()

def net():
    return nn.Linear(8, 3)
"""
COMPILE = (
    "compile net.py:net --pef-name net --data-parallel -b 4 --set data.source=net.py:samples "
    "--set loss.name=cross_entropy --set optimizer.name=adamw"
)
PHASES = ("start", "first step", "middle", "evaluation", "checkpoint", "save")
TARGETS = ("mpirun", "rank", "all")
STEPS = 24
_END_S = 30.0


class Strike(NamedTuple):
    phase: str
    number: signal.Signals
    target: str
    workers: int

    def __str__(self) -> str:
        return f"{self.number.name} to {self.target}, {self.phase}, {self.workers} workers"


MATRIX = tuple(Strike(*one) for one in product(PHASES, STOP_SIGNALS, TARGETS, (0, 2)))


def prepare(folder: Path) -> None:
    (folder / "net.py").write_text(MODEL)
    assert sambasim(COMPILE.split(), folder).returncode == 0


def _wait(phase: str, folder: Path, random: Random) -> bool:
    """Whether the phase came; then this is within it."""
    until, metrics = time.monotonic() + 60, folder / "m.jsonl"

    def has_come() -> bool:
        text = metrics.read_text() if metrics.exists() else ""
        match phase:
            case "start":
                return (folder / "opening").exists()
            case "first step":
                return metrics.exists()
            case "middle":
                return '"step":9,' in text
            case "evaluation":
                return f'"step":{STEPS // 3},' in text
            case "checkpoint":
                return any((folder / "saved").glob(".step-*")) or any((folder / "saved").glob("step-*"))
        return f'"step":{STEPS},' in text

    while not has_come():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    time.sleep(random.random() * {"evaluation": 0.1, "start": 0.4, "save": 0.0}.get(phase, 0.02))
    return True


def _targets(pid: int, job: str, target: str) -> list[int]:
    ranks = [one for one in processes_of(job) if one != pid and "\0sambasim\0run\0" in _command(one)]
    mains = [one for one in ranks if not any(one in children_of(other) for other in ranks)]
    return {"mpirun": [pid], "rank": sorted(mains)[:1], "all": [pid, *ranks]}[target]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _job(folder: Path, name: str, workers: int, steps: int, *flags: str) -> subprocess.Popen[str]:
    run = [*SAMBASIM, "run", "--pef", "net", "--threads", "1", "--workers", str(workers), "--steps", str(steps)]
    files = ["--checkpoint-dir", "saved", "--checkpoint-every", "7", "--metrics", "m.jsonl", "--save", "w.safetensors"]
    return subprocess.Popen(
        [mpirun(), "-np", "2", *run, *files, *flags],
        cwd=folder,
        env=job_environ(name),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _strike(process: subprocess.Popen[str], job: str, target: str, number: int) -> None:
    for pid in _targets(process.pid, job, target):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _end(process: subprocess.Popen[str]) -> str:
    """What it printed."""
    try:
        return process.communicate(timeout=_END_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return f"it had not ended after {_END_S} s\n{process.communicate()[0]}"


def wrong(strike: Strike, folder: Path, seed: int = 0) -> Iterator[str]:
    """What is wrong with how a job ends that is struck so."""
    _clear(folder)
    job, before = f"strike{seed:026}", segment_names()
    process = _job(folder, job, strike.workers, STEPS)
    if not _wait(strike.phase, folder, Random(f"{strike} {seed}")):
        yield f"it did not come to the phase {strike.phase}"
    _strike(process, job, strike.target, strike.number)
    printed = _end(process)
    if process.returncode not in codes_of_signalled(strike.number):
        yield f"exit code {process.returncode}\n{printed[-1500:]}"
    steps = [int(step) for step in re.findall(r'"kind":"step","step":(\d+)', (folder / "m.jsonl").read_text())]
    there = checkpoints_in(folder / "saved") if (folder / "saved").exists() else []
    if not there:
        yield "there is no checkpoint"
    else:
        Checkpoint(there[0])
        if steps and int(there[0].name[5:]) != steps[-1]:
            yield f"{there[0].name} is not of the last step, {steps[-1]}"
    yield from _left(job, before)


def wrong_of_resumed(folder: Path, seed: int, expected: bytes) -> Iterator[str]:
    """What is wrong with a job that is struck three times at any moment of its life, killed at times, and resumed until
    it ends: `expected` are the weights that it must save."""
    _clear(folder)
    random, before = Random(seed), segment_names()
    for turn in range(4):
        job, number = f"strike{seed:020}x{turn:05}", random.choice([*STOP_SIGNALS, signal.SIGKILL])
        target, workers = (
            random.choice(TARGETS if number != signal.SIGKILL else ["rank", "mpirun"]),
            random.choice((0, 2)),
        )
        (folder / "opening").unlink(missing_ok=True)
        process = _job(folder, job, workers, 3 * STEPS, "--resume", "if-any", "--exact")
        codes, has_started = {0}, True
        if turn < 3:
            # Before Python has begun, or of mpirun; of ranks that the launcher kills in turn.
            codes |= {number, number | signal.SIGKILL, -number, 128 + number, *codes_of_signalled(number)}
            time.sleep(random.uniform(0.5, 6))
            has_started = (folder / "opening").exists()
            _strike(process, job, target, number)
        printed = _end(process)
        if process.returncode not in codes:
            yield f"{number.name} to {target}, turn {turn}: exit code {process.returncode}\n{printed[-1500:]}"
        if not has_started:  # nothing can remove what MPI keeps in /dev/shm until all ranks have attached
            before = segment_names()
        yield from _left(job, before)
    if (folder / "w.safetensors").read_bytes() != expected:
        yield "other weights"


def _clear(folder: Path) -> None:
    for name in ("opening", "m.jsonl", "w.safetensors"):
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / "saved", ignore_errors=True)


def _left(job: str, before: frozenset[str]) -> Iterator[str]:
    try:
        check_nothing_left(job, before)
    except pytest.fail.Exception as error:
        yield str(error)


def _random_strikes(folder: Path, number: int) -> int:
    """How many of them went wrong."""
    _clear(folder)
    _end(_job(folder, "strike", 0, 3 * STEPS))
    expected, faults = (folder / "w.safetensors").read_bytes(), 0
    for seed in range(number):
        found = list(wrong_of_resumed(folder, seed, expected))
        faults += bool(found)
        print(f"job {seed}: {'; '.join(found) or 'the same weights'}", flush=True)
    print(f"{number} jobs, {3 * number} strikes, {faults} with something wrong")
    return faults


@click.command()
@click.option("--rounds", default=1, help="How often the matrix is tried.")
@click.option("--random", "jobs", default=0, help="Instead: this many jobs, each struck three times and resumed.")
def main(rounds: int, jobs: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name))
        if jobs:
            sys.exit(_random_strikes(Path(name), jobs) > 0)
        faults = 0
        for seed, strike in product(range(rounds), MATRIX):
            found = list(wrong(strike, Path(name), seed))
            faults += bool(found)
            print(f"{strike}: {'; '.join(found) or 'ended as it should'}", flush=True)
    print(f"{rounds * len(MATRIX)} strikes, {faults} with something wrong")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
