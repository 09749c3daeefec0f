"""Many runs, each hit by a random fault at a random moment; then what is left of each is checked.

python -m tests.faults.sweep --runs 150 --seed 1        make faults
"""

import json
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import click

from sambasim.errors import SambasimError
from sambasim.runtime.checkpoint.folder import checkpoints_in
from sambasim.runtime.checkpoint.format import check
from sambasim.runtime.supervision.supervisor import LEAST_LIMIT_S
from tests.support.mpi import Result, mpirun, run_job

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
    if moment is Moment.START:
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


SYNC_TIMEOUT_S = 5
DEATH_S = 5.0
BUSY_S = 10.0
"""How much longer than promised a job may take to end on a busy machine."""

_OF_MPIRUN = {
    Fault.KILL: ("KILLED BY SIGNAL: 9", "exited on signal 9", "died", "(signal 9)", "Killed (signal 9)"),
    Fault.TERMINATE: ("SIGTERM", "(signal 15)", "signal 15", "died"),
    Fault.EXIT: ("EXIT CODE: 86", "EXIT STRING", "died", "non-zero status", "exit code 86", "Exit code:    86"),
}
_MPI_SEGMENTS = re.compile(r"left shared memory behind: \[('mpich_shm_\w+'(?:, )?)+\]$")


@dataclass(frozen=True, slots=True)
class Case:
    """Which fault is injected into which run, and when."""

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
    """`count` of them, with each fault and each moment equally often."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        moment = list(Moment)[number % len(Moment)]
        fault = list(Fault)[number % len(Fault)]  # their numbers have no common divisor
        ranks = draw.choice((2, 4))
        sync = draw.choice(("--reduce-on-rdu", "", "--host-sync parameter-server"))
        made.append(Case(number, ranks, sync, fault, moment, draw.randrange(ranks), draw.random()))
    return made


def play(case: Case, pef: bytes, state_sha256: str, folder: Path, slack_s: float = BUSY_S) -> Verdict:
    """Run, inject, check, and resume to the end. A job may take `slack_s` longer to end than promised.

    state_sha256: of a run without faults
    """
    lay_out(folder, pef)
    job = _Job(_run(case, f"--sync-timeout {SYNC_TIMEOUT_S}"), folder)
    reached = wait_for(case.moment, folder, case.random, STEPS)
    injected_s = time.monotonic()
    pid = inject(case.fault, case.rank, folder) if reached else None
    result = job.join()
    ended_s = job.ended_s - injected_s
    verdict = Verdict(case, pid is not None and ended_s > 0, result.returncode, max(ended_s, 0.0), stderr=result.stderr)
    for file in folder.glob(f"{FAULT_FILE}*"):
        file.unlink()
    if job.problem is not None and not (case.moment is Moment.START and _is_of_mpi(job.problem)):
        verdict.problems.append(job.problem)
    else:
        if job.problem is None:
            _check_end(verdict, result, folder, slack_s)
        _check_checkpoints(verdict, folder)
        _resume(verdict, state_sha256, folder)
    return verdict


def _is_of_mpi(problem: str) -> bool:
    """Whether only segments that MPI made while it started were left. They are removed."""
    if _MPI_SEGMENTS.search(problem) is None:
        return False
    for name in re.findall(r"mpich_shm_\w+", problem):
        Path("/dev/shm", name).unlink(missing_ok=True)
    return True


class _Job:
    """A job that runs in a thread. What `run_job` finds wrong is `problem`."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self._result: Result | None = None
        self.problem: str | None = None
        self.ended_s = 0.0
        self._thread = threading.Thread(target=self._play, args=(words, folder))
        self._thread.start()

    def join(self) -> Result:
        self._thread.join()
        return self._result or Result(-1, "", "", 0.0)

    def _play(self, words: list[str], folder: Path) -> None:
        began_s = time.monotonic()
        try:
            self._result = run_job(words, cwd=folder, timeout=180)
            self.ended_s = began_s + self._result.elapsed_s
        except BaseException as error:  # pytest.fail's, which is no Exception
            self.problem = str(error)
            self.ended_s = time.monotonic()


def _run(case: Case, more: str) -> list[str]:
    words = (
        f"run --pef net {case.sync} --steps {STEPS} --threads 1 --no-evaluate --metrics metrics.jsonl "
        f"--checkpoint-dir saved --checkpoint-every {SAVE_EVERY} {more}"
    )
    return [mpirun(), "-np", str(case.ranks), *command(words)]


def _check_end(verdict: Verdict, result: Result, folder: Path, slack_s: float) -> None:
    """It ends in time, with an exit code and a root cause."""
    case = verdict.case
    limit_s = slack_s + DEATH_S
    in_mpi = case.fault is Fault.STOP and case.moment in (Moment.START, Moment.END)
    if case.fault is Fault.STOP:
        limit_s += LEAST_LIMIT_S + case.ranks if in_mpi else SYNC_TIMEOUT_S
    finished = '"summary"' in _text(folder / "metrics.jsonl")
    if not verdict.hit or (finished and result.returncode == 0):
        return
    if verdict.ended_s > limit_s:
        verdict.problems.append(f"it took {verdict.ended_s:.1f} s to end")
    if result.returncode == 0:
        verdict.problems.append("the exit code is 0")
    printed = result.stderr + result.stdout
    rank = f"rank {case.rank}"
    if case.fault is Fault.EXCEPTION:
        if printed.count("error[") != 1 or "injected by the sweep" not in printed or f"({rank} on " not in printed:
            verdict.problems.append("the exception is not reported once, with its rank")
    elif case.fault is Fault.STOP:
        named = printed.count("error[") == 1 and rank in printed and "stopped" in printed
        if not named and not (in_mpi and "Timeout (" in printed):
            verdict.problems.append("the rank that was stopped is not named once")
    elif not (any(word in printed for word in _OF_MPIRUN[case.fault]) or _has_status_file(printed, folder)):
        verdict.problems.append("there is no report of what happened")


def _has_status_file(printed: str, folder: Path) -> bool:
    """Whether the status file that the run named when it started is there, with a line for each rank."""
    named = re.findall(r"^if a rank dies: (\S+) says", printed, re.MULTILINE)
    return sum(len(_text(folder / name).splitlines()[1:]) for name in named) > 1


def _check_checkpoints(verdict: Verdict, folder: Path) -> None:
    for path in checkpoints_in(folder / "saved"):
        verdict.checkpoints += 1
        try:
            check(path)
        except SambasimError as error:
            verdict.problems.append(f"a checkpoint is damaged: {error}")


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
@click.option("--only", type=int, help="Just the run with this number.")
@click.option("--slack", default=1.0, help="How many seconds longer than promised a job may take to end.")
def main(runs: int, seed: int, only: int | None, slack: float) -> None:
    """Inject a random fault at a random moment into each of RUNS runs, and check what is left of them."""
    with tempfile.TemporaryDirectory(prefix="sambasim-sweep-") as place:
        verdicts = sweep([case for case in cases(runs, seed) if only in (None, case.number)], Path(place), slack)
    failed = [verdict for verdict in verdicts if verdict.problems]
    slowest = max((verdict.ended_s for verdict in verdicts if verdict.hit), default=0.0)
    print(f"{len(verdicts)} runs, {sum(verdict.hit for verdict in verdicts)} hit, slowest end {slowest:.1f} s later")
    for verdict in failed:
        print(f"\n{verdict.case}\n" + "\n".join(verdict.problems) + f"\n{verdict.stderr[-3000:]}")
    print(f"{len(verdicts) - len(failed)} as promised, {len(failed)} not")
    sys.exit(bool(failed))


def sweep(chosen: list[Case], place: Path, slack_s: float = BUSY_S) -> list[Verdict]:
    """Play each of `chosen` in a folder of its own."""
    pef, state_sha256, verdicts = compile_model(place / "model"), {}, []
    for case in chosen:
        ranks = case.ranks
        if ranks not in state_sha256:
            state_sha256[ranks] = _undisturbed(ranks, place / f"undisturbed{ranks}", pef)
        folder = place / str(case.number)
        folder.mkdir()
        verdict = play(case, pef, state_sha256[ranks], folder, slack_s)
        verdicts.append(verdict)
        state = "; ".join(verdict.problems).splitlines()[0][:100] if verdict.problems else "as promised"
        hit = f"exit {verdict.exit_code:4}, {verdict.ended_s:4.1f} s" if verdict.hit else "ended before"
        print(f"{case}  {hit}, {verdict.checkpoints} checkpoints: {state}", flush=True)
    return verdicts


def _undisturbed(ranks: int, folder: Path, pef: bytes) -> str:
    folder.mkdir()
    lay_out(folder, pef)
    words = f"run --pef net --steps {STEPS} --threads 1 --no-evaluate --json"
    result = run_job([mpirun(), "-np", str(ranks), *command(words)], cwd=folder, timeout=120).check()
    digest: str = json.loads(result.stdout)["state_sha256"]
    return digest


if __name__ == "__main__":
    main()
