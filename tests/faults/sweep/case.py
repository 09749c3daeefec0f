"""One run of the sweep: started, struck, looked at, and gone on with."""

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
from sambasim.runtime.checkpoint.reader import check
from tests.faults.sweep.blows import Blow, Moment, strike, wait_for
from tests.faults.sweep.subject import COMPILE, SAVE_EVERY, STEPS, Subject, command, lay_out
from tests.support.mpi import Result, mpirun, run_job

SYNC_TIMEOUT_S = 5
DEATH_S = 5.0
BUSY_S = 10.0
"""A busy machine may take so much longer to end a job than it is promised."""

_SPOKEN = {
    Blow.KILL: ("KILLED BY SIGNAL: 9", "exited on signal 9", "died", "(signal 9)", "Killed (signal 9)"),
    Blow.TERMINATE: ("SIGTERM", "(signal 15)", "signal 15", "died"),
    Blow.EXIT: ("EXIT CODE: 86", "EXIT STRING", "died", "non-zero status", "exit code 86", "Exit code:    86"),
}


@dataclass(frozen=True, slots=True)
class Case:
    """What is done to which run."""

    number: int
    ranks: int
    sync: str
    blow: Blow
    moment: Moment
    victim: int
    random_s: float

    def __str__(self) -> str:
        where = "compile" if self.moment is Moment.COMPILE else f"np {self.ranks} {self.sync or 'host'}"
        return f"{self.number:3}  {where:26} rank {self.victim}  {self.blow:14} {self.moment:14}"


@dataclass(slots=True)
class Verdict:
    """What came of it. `faults` is empty where all is as promised."""

    case: Case
    struck: bool
    exit_code: int
    ended_s: float
    checkpoints: int
    faults: list[str] = field(default_factory=list)
    stderr: str = ""


def cases(count: int, seed: int) -> list[Case]:
    """`count` of them, each kind of blow and each moment equally often."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        moment = list(Moment)[number % len(Moment)]
        blow = list(Blow)[(number + number // len(Moment)) % len(Blow)]
        if moment is Moment.COMPILE and blow in (Blow.STOP, Blow.EXCEPTION):
            blow = Blow.KILL  # one process: nobody waits for it, and what raises in it is the user's own code
        ranks = draw.choice((2, 4))
        sync = draw.choice(("--reduce-on-rdu", "", "--host-sync parameter-server"))
        made.append(Case(number, ranks, sync, blow, moment, draw.randrange(ranks), draw.random()))
    return made


def play(case: Case, subject: Subject, folder: Path, slack_s: float = BUSY_S) -> Verdict:
    """Start, strike, look, and go on to the end. A job may take `slack_s` longer to end than it is promised."""
    compiles = case.moment is Moment.COMPILE
    lay_out(folder, None if compiles else subject.pef)
    started = command(COMPILE) if compiles else _run(case, f"--sync-timeout {SYNC_TIMEOUT_S}")
    job = _Job(started, folder)
    came = wait_for(case.moment, folder, case.random_s, STEPS)
    struck_s = time.monotonic()
    pid = strike(case.blow, 0 if compiles else case.victim, folder) if came else None
    result = job.join()
    ended_s = job.ended_s - struck_s
    verdict = Verdict(case, pid is not None and ended_s > 0, result.returncode, max(ended_s, 0.0), 0, [], result.stderr)
    for blow in folder.glob("blow-*"):
        blow.unlink()
    if job.fault is not None:
        verdict.faults.append(job.fault)
    elif compiles:
        _look_at_pef(verdict, folder)
    else:
        _look_at_end(verdict, result, folder, slack_s)
        _look_at_checkpoints(verdict, folder)
        _go_on(verdict, subject, folder)
    return verdict


class _Job:
    """A job in a thread of its own, so that it can be struck meanwhile. What `run_job` finds wrong is `fault`."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self._result: Result | None = None
        self.fault: str | None = None
        self.ended_s = 0.0
        self._thread = threading.Thread(target=self._play, args=(words, folder))
        self._thread.start()

    def join(self) -> Result:
        self._thread.join()
        return self._result or Result(-1, "", "", 0.0)

    def _play(self, words: list[str], folder: Path) -> None:
        began_s = time.monotonic()
        try:
            self._result = run_job(words, cwd=folder, timeout=120)
            self.ended_s = began_s + self._result.elapsed_s
        except BaseException as error:  # pytest.fail's, which is no Exception
            self.fault = str(error)
            self.ended_s = time.monotonic()


def _run(case: Case, more: str) -> list[str]:
    words = (
        f"run --pef net {case.sync} --steps {STEPS} --threads 1 --no-evaluate --metrics metrics.jsonl "
        f"--checkpoint-dir saved --checkpoint-every {SAVE_EVERY} {more}"
    )
    return [mpirun(), "-np", str(case.ranks), *command(words)]


def _look_at_pef(verdict: Verdict, folder: Path) -> None:
    """A PEF that is there is whole."""
    path = folder / "out" / "net" / "net.pef"
    if path.exists():
        try:
            check_pef(path)
        except SambasimError as error:
            verdict.faults.append(f"a PEF was left that is not whole: {error}")
    elif verdict.exit_code == 0:
        verdict.faults.append("compile says that all went well, and there is no PEF")


def _look_at_end(verdict: Verdict, result: Result, folder: Path, slack_s: float) -> None:
    """In time, with an exit code and a root cause."""
    case = verdict.case
    limit_s = slack_s + (SYNC_TIMEOUT_S if case.blow is Blow.STOP else 0) + DEATH_S
    finished = '"summary"' in _text(folder / "metrics.jsonl")
    if not verdict.struck or (finished and result.returncode == 0):
        return
    if verdict.ended_s > limit_s:
        verdict.faults.append(f"it took {verdict.ended_s:.1f} s to end")
    if result.returncode == 0:
        verdict.faults.append("the exit code is 0")
    told = result.stderr + result.stdout
    rank = f"rank {case.victim}"
    if case.blow is Blow.EXCEPTION:
        if told.count("error[") != 1 or "struck by the sweep" not in told or f"({rank} on " not in told:
            verdict.faults.append("the exception is not told once, with its rank")
    elif case.blow is Blow.STOP:
        if told.count("error[") != 1 or rank not in told or "stopped" not in told:
            verdict.faults.append("the rank that was stopped is not named once")
    elif not (any(word in told for word in _SPOKEN[case.blow]) or _is_on_board(told, folder)):
        verdict.faults.append("nobody says what happened")


def _is_on_board(told: str, folder: Path) -> bool:
    """Whether what the run named when it started is there, and says what each rank was doing."""
    named = re.findall(r"^if a rank dies: (\S+) says", told, re.MULTILINE)
    lines = [line for name in named for line in _text(folder / name).splitlines()[1:]]
    return any("step" in line or "section" in line or "checkpoint" in line for line in lines) or len(lines) > 1


def _look_at_checkpoints(verdict: Verdict, folder: Path) -> None:
    for path in checkpoints_in(folder / "saved"):
        verdict.checkpoints += 1
        try:
            check(path)
        except SambasimError as error:
            verdict.faults.append(f"a checkpoint is damaged: {error}")


def _go_on(verdict: Verdict, subject: Subject, folder: Path) -> None:
    """To the end, where the weights must be those of a run that nobody struck."""
    more = "--json --resume auto" if verdict.checkpoints else "--json"
    try:
        result = run_job(_run(verdict.case, more), cwd=folder, timeout=120)
    except BaseException as error:  # pytest.fail's, which is no Exception
        verdict.faults.append(f"going on: {error}")
        return
    if result.returncode != 0:
        verdict.faults.append(f"it does not go on: {result.stderr}")
        return
    found = json.loads(result.stdout)["state_sha256"]
    if found != subject.state_sha256[verdict.case.ranks]:
        verdict.faults.append("its state is another than that of a run that nobody struck")


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
