"""One run of the sweep: started, hit by a fault, checked, and resumed."""

import json
import random
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from sambasim.errors import SambasimError
from sambasim.pef import check as check_pef
from sambasim.runtime.checkpoint.folder import checkpoints_in
from sambasim.runtime.checkpoint.format import check
from sambasim.runtime.supervision.supervisor import LEAST_LIMIT_S
from tests.faults.sweep.inject import (
    COMPILE,
    FAULT_FILE,
    SAVE_EVERY,
    STEPS,
    Fault,
    Moment,
    command,
    inject,
    lay_out,
    wait_for,
)
from tests.support.mpi import Result, mpirun, run_job

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
        where = "compile" if self.moment is Moment.COMPILE else f"np {self.ranks} {self.sync or 'host'}"
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
        fault = list(Fault)[(number + number // len(Moment)) % len(Fault)]
        if moment is Moment.COMPILE and fault in (Fault.STOP, Fault.EXCEPTION):
            fault = Fault.KILL  # no rank waits for a compile, and exceptions in it are the user's
        ranks = draw.choice((2, 4))
        sync = draw.choice(("--reduce-on-rdu", "", "--host-sync parameter-server"))
        made.append(Case(number, ranks, sync, fault, moment, draw.randrange(ranks), draw.random()))
    return made


def play(case: Case, pef: bytes, state_sha256: str, folder: Path, slack_s: float = BUSY_S) -> Verdict:
    """Run, inject, check, and resume to the end. A job may take `slack_s` longer to end than promised.

    state_sha256: of a run without faults
    """
    compiles = case.moment is Moment.COMPILE
    lay_out(folder, None if compiles else pef)
    job = _Job(command(COMPILE) if compiles else _run(case, f"--sync-timeout {SYNC_TIMEOUT_S}"), folder)
    reached = wait_for(case.moment, folder, case.random, STEPS)
    injected_s = time.monotonic()
    pid = inject(case.fault, 0 if compiles else case.rank, folder) if reached else None
    result = job.join()
    ended_s = job.ended_s - injected_s
    verdict = Verdict(case, pid is not None and ended_s > 0, result.returncode, max(ended_s, 0.0), stderr=result.stderr)
    for file in folder.glob(f"{FAULT_FILE}*"):
        file.unlink()
    if job.problem is not None and not (case.moment is Moment.START and _is_of_mpi(job.problem)):
        verdict.problems.append(job.problem)
    elif compiles:
        _check_pef(verdict, folder)
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


def _check_pef(verdict: Verdict, folder: Path) -> None:
    """A PEF that exists is whole."""
    path = folder / "out" / "net" / "net.pef"
    if path.exists():
        try:
            check_pef(path)
        except SambasimError as error:
            verdict.problems.append(f"a PEF was left that is not whole: {error}")
    elif verdict.exit_code == 0:
        verdict.problems.append("compile exits with 0, and there is no PEF")


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
