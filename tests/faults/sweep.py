"""Many runs, each hit by a random fault at a random moment; then what is left of each is checked.

python -m tests.faults.sweep --runs 150 --seed 1        make faults
"""

import json
import random
import re
import shlex
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import click

from sambasim.errors import SambasimError
from sambasim.runtime.checkpoint.content import Checkpoint
from sambasim.runtime.checkpoint.folder import checkpoints_in
from sambasim.runtime.watch.watchdog import LEAST_LIMIT_S
from tests.faults.command import sambasim
from tests.support.mpi import SAMBASIM, Result, mpirun, run_job

STEPS = 60
SAVE_EVERY = 7
MODEL = '''
"""A model and its data. In each rank of a job, a thread waits for a file that names a fault, and causes it at whatever
moment that is."""

import ctypes
import os
import signal
import threading
import time

import torch
from torch import nn
from torch.utils.data import Dataset


class Injected(RuntimeError):
    def __str__(self):
        return "injected by the sweep"


def _wait(main, rank):
    while not os.path.exists("fault-" + rank):
        time.sleep(0.001)
    os.rename("fault-" + rank, "injected")
    fault = open("injected").read()
    if fault.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[fault])
    elif fault == "os._exit(86)":
        os._exit(86)
    else:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(Injected))


class Samples(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.001)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(12, generator=generator), index % 5


def samples():
    rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
    if rank:
        threading.Thread(target=_wait, args=(threading.main_thread().ident, rank), daemon=True).start()
    return Samples()


def net():
    return nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 5))
'''

COMPILE = (
    "compile net.py:net --pef-name net --data-parallel -b 4 --set data.source=net.py:samples "
    "--set loss.name=cross_entropy --set optimizer.name=adamw"
)


class Fault(StrEnum):
    KILL = "SIGKILL"
    TERMINATE = "SIGTERM"
    STOP = "SIGSTOP"
    EXCEPTION = "an exception"
    EXIT = "os._exit(86)"


class Moment(StrEnum):
    STEP = "mid-step"
    CHECKPOINT = "mid-checkpoint"
    END = "end"


def wait_for(moment: Moment, folder: Path, random: float) -> bool:
    """Return at `moment` of the run in `folder`; False if it does not come. `random`, 0 to 1, chooses within it."""
    until, metrics = time.monotonic() + 60.0, folder / "metrics.jsonl"
    step = {Moment.STEP: 1 + int(random * (STEPS - 10)), Moment.CHECKPOINT: 1, Moment.END: STEPS}[moment]
    saves = moment is Moment.CHECKPOINT
    while f'"step":{step},' not in _text(metrics) or (saves and not any((folder / "saved").glob(".step-*"))):
        if time.monotonic() > until or (saves and f'"step":{STEPS},' in _text(metrics)):
            return False
        time.sleep(0.0005)
    time.sleep(random * {Moment.STEP: 0.05, Moment.CHECKPOINT: 0.01, Moment.END: 0.3}[moment])
    return True


SYNC_TIMEOUT_S = 5
DEATH_S = 5.0
IDLE_S, BUSY_S = 1.0, 10.0
"""How much longer than promised a job may take to end, by itself and on a busy machine."""

_OF_MPIRUN = {
    Fault.KILL: ("KILLED BY SIGNAL: 9", "signal 9", "died"),
    Fault.TERMINATE: ("SIGTERM", "signal 15", "died"),
    Fault.EXIT: ("EXIT CODE: 86", "EXIT STRING", "died", "non-zero status", "exit code 86", "Exit code:    86"),
}


class Case(NamedTuple):
    number: int
    ranks: int
    sync: str
    fault: Fault
    moment: Moment
    rank: int
    random: float

    def __str__(self) -> str:
        where = f"np {self.ranks} {self.sync or 'host'}"
        return f"{self.number:3}  {where:26} rank {self.rank}  {self.fault:14} {self.moment:14}"


@dataclass(slots=True)
class Verdict:
    """What came of it. `problems` is empty if every promise was kept."""

    case: Case
    hit: bool
    exit_code: int
    ended_s: float
    checkpoints: int = 0
    problems: list[str] = field(default_factory=list)
    stderr: str = ""


def cases(count: int, seed: int) -> list[Case]:
    """`count` of them, with each fault and each moment equally often: 3 and 5 have no common divisor."""
    draw = random.Random(seed)
    made = []
    for number, moment, fault in zip(range(count), cycle(Moment), cycle(Fault), strict=False):
        ranks, sync = draw.choice((2, 4)), draw.choice(("--reduce-on-rdu", "", "--host-sync parameter-server"))
        made.append(Case(number, ranks, sync, fault, moment, draw.randrange(ranks), draw.random()))
    return made


def play(case: Case, state_sha256: str, folder: Path, slack_s: float) -> Verdict:
    """Run, inject, check, and resume to the end. A job may take `slack_s` longer to end than promised. `state_sha256`:
    of a run without faults."""
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(run_job, _run(case, f"--sync-timeout {SYNC_TIMEOUT_S}"), cwd=folder, timeout=180)
        began_s = time.monotonic()
        if wait_for(case.moment, folder, case.random):
            (folder / "new").write_text(case.fault)
            (folder / "new").rename(folder / f"fault-{case.rank}")
        injected_s = time.monotonic() - began_s
    if problem := job.exception():  # pytest.fail's too, which is no Exception
        return Verdict(case, True, -1, 0.0, problems=[str(problem)])
    result = job.result()
    hit = (folder / "injected").exists()
    verdict = Verdict(case, hit, result.returncode, max(0.0, result.elapsed_s - injected_s), stderr=result.stderr)
    (folder / f"fault-{case.rank}").unlink(missing_ok=True)
    _check_end(verdict, result, folder, slack_s)
    for path in checkpoints_in(folder / "saved"):
        verdict.checkpoints += 1
        try:
            Checkpoint(path)
        except SambasimError as error:
            verdict.problems.append(f"a checkpoint is damaged: {error}")
    _resume(verdict, state_sha256, folder)
    return verdict


def _run(case: Case, more: str) -> list[str]:
    words = (
        f"run --pef net {case.sync} --steps {STEPS} --threads 1 --no-evaluate --metrics metrics.jsonl "
        f"--checkpoint-dir saved --checkpoint-every {SAVE_EVERY} {more}"
    )
    return [mpirun(), "-np", str(case.ranks), *SAMBASIM, *shlex.split(words)]


def _check_end(verdict: Verdict, result: Result, folder: Path, slack_s: float) -> None:
    """It ends in time, with an exit code and a root cause."""
    case, problem = verdict.case, verdict.problems.append
    is_stop = case.fault is Fault.STOP
    in_mpi = is_stop and case.moment is Moment.END
    if not verdict.hit or ('"summary"' in _text(folder / "metrics.jsonl") and result.returncode == 0):
        return
    promised_s = DEATH_S + (LEAST_LIMIT_S + case.ranks if in_mpi else SYNC_TIMEOUT_S if is_stop else 0.0)
    if verdict.ended_s > slack_s + promised_s:
        problem(f"it took {verdict.ended_s:.1f} s to end")
    if result.returncode == 0:
        problem("the exit code is 0")
    printed, rank = result.stderr + result.stdout, f"rank {case.rank}"
    is_one = printed.count("error[") == 1
    if case.fault is Fault.EXCEPTION:
        if not is_one or "injected by the sweep" not in printed or f"({rank} on " not in printed:
            problem("the exception is not reported once, with its rank")
    elif is_stop:
        if not (is_one and rank in printed and "stopped" in printed) and not (in_mpi and "Timeout (" in printed):
            problem("the rank that was stopped is not named once")
    elif not any(word in printed for word in _OF_MPIRUN[case.fault]):
        # Else the status file that the run named when it started must be there, with a line for each rank.
        files = re.findall(r"^status file: (\S+) says", printed, re.MULTILINE)
        if sum(len(_text(folder / name).splitlines()[1:]) for name in files) <= 1:
            problem("there is no report of what happened")


def _resume(verdict: Verdict, state_sha256: str, folder: Path) -> None:
    """To the end, where the weights must be those of a run without faults."""
    more = "--json --resume auto" if verdict.checkpoints else "--json"
    try:
        result = run_job(_run(verdict.case, more), cwd=folder, timeout=120)
    except BaseException as error:  # pytest.fail's, which is no Exception
        verdict.problems.append(f"when resumed: {error}")
        return
    if result.returncode != 0:
        verdict.problems.append(f"it cannot be resumed: {result.stderr}")
    elif json.loads(result.stdout)["state_sha256"] != state_sha256:
        verdict.problems.append("its state differs from that of a run without faults")


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


@click.command()
@click.option("--runs", default=150, help="How many runs.")
@click.option("--seed", default=1, help="Of the faults, ranks and moments.")
def main(runs: int, seed: int) -> None:
    """Inject a random fault at a random moment into each of RUNS runs, and check what is left of them."""
    with tempfile.TemporaryDirectory(prefix="sambasim-sweep-") as place:
        verdicts = sweep(cases(runs, seed), Path(place), IDLE_S)
    failed = [verdict for verdict in verdicts if verdict.problems]
    slowest = max((verdict.ended_s for verdict in verdicts if verdict.hit), default=0.0)
    print(f"{len(verdicts)} runs, {sum(verdict.hit for verdict in verdicts)} hit, slowest end {slowest:.1f} s later")
    for verdict in failed:
        print(f"\n{verdict.case}\n" + "\n".join(verdict.problems) + f"\n{verdict.stderr[-3000:]}")
    print(f"{len(verdicts) - len(failed)} as promised, {len(failed)} not")
    sys.exit(bool(failed))


def sweep(chosen: list[Case], place: Path, slack_s: float = BUSY_S) -> list[Verdict]:
    (place / "net.py").write_text(MODEL)
    sambasim(COMPILE, place).check()
    state_sha256: dict[int, str] = {}
    verdicts = []
    for case in chosen:
        if case.ranks not in state_sha256:
            words = f"run --pef net --emulate-replicas {case.ranks} --steps {STEPS} --threads 1 --no-evaluate --json"
            state_sha256[case.ranks] = json.loads(sambasim(words, place).check().stdout)["state_sha256"]
        folder = place / str(case.number)
        shutil.copytree(place / "out", folder / "out")
        (folder / "net.py").write_text(MODEL)
        verdict = play(case, state_sha256[case.ranks], folder, slack_s)
        verdicts.append(verdict)
        state = "; ".join(verdict.problems).splitlines()[0][:100] if verdict.problems else "as promised"
        hit = f"exit {verdict.exit_code:4}, {verdict.ended_s:4.1f} s" if verdict.hit else "ended before"
        print(f"{case}  {hit}, {verdict.checkpoints} checkpoints: {state}", flush=True)
    return verdicts


if __name__ == "__main__":
    main()
